# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws tokens from logits. A token depends on its row's logits and one uniform number, and on nothing else."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.generation.interface import SamplingParameters


class SampledTokens(NamedTuple):
    """One token for each row, and its log-probability in nats before top-k and top-p."""

    token_ids: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]


def uniform_numbers(seed: int, count: int) -> Float[np.ndarray, " count"]:
    """The numbers in [0, 1) that draw the first `count` tokens of a response; a longer list begins with a shorter one.

    Args:
        seed: Not negative. It is the key of a counter-based generator (Philox): other seeds give unrelated numbers.
        count: How many.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def truncate(
    probs: Float[Tensor, "rows vocabulary"], top_k: int | None, top_p: float
) -> Float[Tensor, "rows vocabulary"]:
    """Sets to zero what top-k leaves out, and then what top-p leaves out of the rest; nothing is normalised again.

    Args:
        probs: Probabilities. Of equal ones the token with the lower number ranks first.
        top_k: Keeps the so many most likely tokens; None keeps all.
        top_p: Keeps the fewest most likely tokens that hold this share of what top-k left; 1 keeps all.
    """
    vocabulary = probs.shape[-1]
    if (top_k is None or top_k >= vocabulary) and top_p >= 1:
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked, order = ranked[:, :top_k], order[:, :top_k]
    if top_p < 1:
        up_to = ranked.cumsum(-1, dtype=torch.float64)
        ranked = ranked.where(up_to - ranked < top_p * up_to[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def draw(weights: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """Inverse of the cumulative distribution at one number for each row. Never a token of weight zero.

    Args:
        weights: Not negative, in any scale, some of each row positive.
        uniforms: In [0, 1), float64.
    """
    # In float32 the sum over a large vocabulary would lose its rare tokens.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = cumulative[:, -1:] * uniforms[:, None]
    # The first token whose sum lies above the target: it has added something. The clamp is for parallel sums, which
    # can round differently from one entry to the next.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=weights.shape[-1] - 1)


def sample(
    logits: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, " rows"], parameters: SamplingParameters
) -> SampledTokens:
    """Chooses one token for each row: temperature, then top-k, then top-p; greedy at temperature 0.

    Args:
        logits: Of the real vocabulary, without padding.
        uniforms: In [0, 1), float64; not used when greedy.
        parameters: How to choose.
    """
    logits = logits.float()
    greedy = parameters.temperature == 0
    if not greedy and parameters.temperature != 1:
        logits = logits / parameters.temperature
    probs = logits.softmax(-1)
    token_ids = logits.argmax(-1) if greedy else draw(truncate(probs, parameters.top_k, parameters.top_p), uniforms)
    # A token that is drawn has a probability above zero: nothing is lost by taking the logarithm last.
    return SampledTokens(token_ids, probs.gather(-1, token_ids[:, None])[:, 0].log())

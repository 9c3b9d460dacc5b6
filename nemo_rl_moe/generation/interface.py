# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What an algorithm sees of a generation engine, whether it shares the trainer's weights or keeps a copy of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class SamplingParameters:
    """How tokens are drawn. The order is that of transformers and vLLM: temperature, then top-k, then top-p.

    Attributes:
        max_new_tokens: Most tokens of a response, its end token included.
        temperature: Divides the logits; 0 takes the token ranked first (greedy).
        top_k: Draw from the so many most likely tokens only; None: from all.
        top_p: Draw from the fewest most likely tokens whose probabilities add up to this; 1: from all.
        stop_token_ids: A response ends with the first of these, which belongs to it.
        stop_strings: A response ends with the token that completes one of these, which belongs to it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_token_ids: TokenIds = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts to continue.

    Attributes:
        prompts: Token ids of each prompt, none of them empty; of different lengths as they come.
        seeds: One for each prompt, not negative. What a response becomes depends on the weights, its prompt, its seed
            and the sampling parameters, and neither on the other prompts nor on the layout of the ranks.
        sampling: The same for all.
    """

    prompts: tuple[TokenIds, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParameters


@dataclass(frozen=True)
class GeneratedSequence:
    """One response.

    Attributes:
        token_ids: The sampled tokens, the end token included where there is one.
        logprobs: Log-probability of each sampled token, in nats, of the softmax of all logits divided by the
            temperature (1 when greedy): what a training forward with the same temperature computes. Top-k and top-p
            choose among tokens, and change nothing here.
        is_truncated: It reached `max_new_tokens` without an end.
        weight_version: The weights that made it: how many optimizer steps they had seen.
        chosen_experts: Experts of each token in each MoE layer, where an engine reports them.
    """

    token_ids: Int[np.ndarray, " tokens"]
    logprobs: Float[np.ndarray, " tokens"]
    is_truncated: bool
    weight_version: int
    chosen_experts: Int[np.ndarray, "tokens moe_layers topk"] | None = None


class GenerationInterface(Protocol):
    """A generation engine.

    Attributes:
        shares_weights: True where it runs the trainer's own weights: they are always current and `refit` is never
            called. False where it keeps a copy, which `refit` brings up to date.
    """

    shares_weights: bool

    def generate(self, request: GenerationRequest) -> Sequence[GeneratedSequence]:
        """One response for each prompt, in the order of the prompts."""
        ...

    def refit(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Takes new weights.

        Args:
            weights: Hugging Face names and full tensors, one at a time.
            weight_version: What sequences made from now on will carry.
        """
        ...

    def shutdown(self) -> None:
        """Lets go of whatever the engine has started."""
        ...

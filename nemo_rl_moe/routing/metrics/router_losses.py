# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Router losses: load balancing and z-loss, as sums over tokens or sequences.

Each loss function returns a sum over a rank's tokens in a microbatch. The loss is the total over all ranks and
microbatches, divided by the number of tokens or sequences in the global batch. docs/router-losses.md gives the
equations.
"""

import torch
from torch import Tensor

from nemo_rl_moe.shapes import Float, Int


def router_scores(logits: Float[Tensor, "tokens experts"], score_function: str) -> Float[Tensor, "tokens experts"]:
    """Return the scores of the balancing losses, which add up to 1 over the experts, in float32 or float64.

    Args:
        score_function: `softmax`, or `sigmoid` as in DeepSeek-V3 (equation 19).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function == "sigmoid":
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)
    raise ValueError(f"score function: got {score_function}, expected softmax or sigmoid")


def z_loss_sum(logits: Float[Tensor, "tokens experts"], is_token: Float[Tensor, " tokens"]) -> Float[Tensor, ""]:
    """Return the sum over tokens of the squared logsumexp of their logits (ST-MoE, equation 5).

    Args:
        is_token: 1 for tokens, 0 for padding. Its dtype is that of the sum.
    """
    return logits.to(is_token.dtype).logsumexp(-1).square() @ is_token


def load_of_tokens(
    assignments: Float[Tensor, "tokens experts"], is_token: Float[Tensor, " tokens"]
) -> Float[Tensor, " experts"]:
    """Return the number of tokens of each expert.

    Args:
        assignments: 1 for a token's experts, otherwise 0.
        is_token: 1 for tokens, 0 for padding.
    """
    return is_token @ assignments


def balancing_sum(
    scores: Float[Tensor, "tokens experts"], is_token: Float[Tensor, " tokens"], load: Float[Tensor, " experts"]
) -> Float[Tensor, ""]:
    """Return `E * sum over tokens and experts of f_e * p_{t,e}` (Switch Transformer, equation 4).

    Args:
        scores: `p`, from `router_scores`.
        is_token: 1 for tokens, 0 for padding.
        load: Number of assignments of each expert, over all tokens that are balanced together. These tokens may come
            from several ranks and microbatches. `f_e` is the expert's share of the assignments.
    """
    share = load / load.sum().clamp(min=1)
    return (is_token @ scores) @ share * scores.shape[-1]


def load_of_sequences(
    assignments: Float[Tensor, "tokens experts"], sequence: Int[Tensor, " tokens"], num_sequences: int
) -> Float[Tensor, "sequences experts"]:
    """Return the number of each sequence's tokens at each expert.

    Args:
        sequence: Index of each token's sequence, -1 for padding.
    """
    return _sums_of_sequences(assignments, sequence, num_sequences)


def sequence_balancing_sum(
    scores: Float[Tensor, "tokens experts"],
    sequence: Int[Tensor, " tokens"],
    load: Float[Tensor, "sequences experts"],
    topk: int,
) -> Float[Tensor, ""]:
    """Return `E * sum over sequences and experts of f_{s,e} * P_{s,e}` (DeepSeek-V2, equation 23; V3, equation 17).

    `f` is an expert's share of a sequence's assignments, and `P` the mean of its scores over the sequence's tokens.

    Args:
        scores: `p`, from `router_scores`.
        sequence: Index of each token's sequence, -1 for padding.
        load: Sum of `load_of_sequences` over the ranks that share the sequences.
    """
    assignments = load.sum(-1, keepdim=True).clamp(min=1)
    weights = load / assignments * (topk / assignments)  # f_{s,e} over the length of the sequence
    return (_sums_of_sequences(scores, sequence, len(load)) * weights).sum() * scores.shape[-1]


def _sums_of_sequences(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    places = sequence.where(sequence >= 0, num_sequences)  # padding goes to an extra row, which is dropped
    sums = values.new_zeros(num_sequences + 1, values.shape[-1])
    return sums.index_add(0, places, values)[:num_sequences]

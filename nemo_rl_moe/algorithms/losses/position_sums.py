# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of a policy-gradient loss over the quarters of each sequence, for the mismatch by position.

Rounding in an engine's state of earlier tokens, such as a gated delta net's, carries over to all later tokens. Quarters
divide each sequence's trained tokens, so that long and short sequences count alike in all four.
"""

from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_metrics import Metrics, class_sums

QUARTERS = ("first_quarter", "second_quarter", "third_quarter", "last_quarter")
"""Names of the classes in the metrics."""


class PositionSum(StrEnum):
    """Quantity that the loss sums over each quarter of the sequences, for metrics by position."""

    TOKENS = "tokens"
    DIFFERENCE = "difference"
    """`|log training - log generation|`."""


def sum_key(quarter: str, quantity: PositionSum) -> str:
    """Return the name of a sum among the metrics of a loss."""
    return f"by_position/{quarter}/sum_{quantity}"


def quarters_of(mask: Bool[Tensor, "sequences targets"]) -> Int[Tensor, "sequences targets"]:
    """Return for each trained token its quarter of the sequence's trained tokens, and -1 for other tokens.

    A token after `i` of `n` trained tokens is in quarter `floor(4 i / n)`.
    """
    before = mask.cumsum(1) - 1
    quarter = 4 * before // mask.sum(1, keepdim=True).clamp(min=1)
    return quarter.where(mask, -1)


def position_sums(
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
) -> Metrics:
    """Return, for each quarter of the sequences' trained tokens, the sums of the quantities in `PositionSum`.

    Args:
        prev: Log-probabilities of the policy before the step. Masked ones must be finite.
        generation: Log-probabilities by the engine that sampled the tokens. Masked ones must be finite.
    """
    difference = (prev - generation).abs()
    of_tokens = {PositionSum.TOKENS: torch.ones_like(difference), PositionSum.DIFFERENCE: difference}
    return class_sums(QUARTERS, quarters_of(mask), of_tokens, sum_key)

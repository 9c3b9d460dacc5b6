# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of a policy-gradient loss over the quarters of each sequence, of which the mismatch by position is made.

What an engine keeps of earlier tokens, such as the state of a gated delta net, passes its rounding on to all later
ones. Quarters are those of each sequence's own trained tokens: long and short sequences count in all four alike.
"""

from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_metrics import Metrics
from nemo_rl_moe.metrics import Reduction

QUARTERS = ("first_quarter", "second_quarter", "third_quarter", "last_quarter")
"""Names of the classes, as metrics have them."""


class PositionSum(StrEnum):
    """Quantity that is summed over tokens."""

    TOKENS = "tokens"
    DIFFERENCE = "difference"
    """`|log training - log generation|`."""


def sum_key(quarter: str, quantity: PositionSum) -> str:
    """Return the name of a sum among the metrics of a loss."""
    return f"by_position/{quarter}/sum_{quantity}"


def quarters_of(mask: Bool[Tensor, "sequences targets"]) -> Int[Tensor, "sequences targets"]:
    """Return the quarter of its sequence's trained tokens that each of them is in; -1 for the others.

    Of `n` trained tokens the one after `i` others is in quarter `floor(4 i / n)`.
    """
    before = mask.cumsum(1) - 1
    quarter = 4 * before // mask.sum(1, keepdim=True).clamp(min=1)
    return quarter.where(mask, -1)


def position_sums(
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
) -> Metrics:
    """Compute the sums of each quarter.

    Args:
        prev: Log-probabilities of the policy before the step; finite where masked.
        generation: By the engine that sampled the tokens; finite where masked.
    """
    quarter = quarters_of(mask)
    difference = (prev - generation).abs().detach().double()
    values = torch.stack([torch.ones_like(difference), difference])
    metrics: Metrics = {}
    for number, name in enumerate(QUARTERS):
        sums = values.where(quarter == number, 0).sum((1, 2))
        keys = (sum_key(name, each) for each in PositionSum)
        metrics |= {key: (total, Reduction.PART) for key, total in zip(keys, sums, strict=True)}
    return metrics

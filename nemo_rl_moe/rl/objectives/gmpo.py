# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GMPO: the geometric mean of the clipped ratios of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.aggregation import sequence_mean
from nemo_rl_moe.rl.objectives.interface import LARGEST_LOG_RATIO, Clipping, Objective, ObjectiveInputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig


def clipped_log_ratio(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return the log-ratio of each token, at least `-ratio_clip_min` for `A < 0`, at most `ratio_clip_max` for `A > 0`.

    No log-ratio is above `LARGEST_LOG_RATIO`.
    """
    clipping = gmpo_clipping(inputs)
    found = inputs.log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return found.masked_fill(clipping.low, -inputs.config.ratio_clip_min).masked_fill(
        clipping.high, inputs.config.ratio_clip_max
    )


def gmpo(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-(prod_t clip(ratio_t)) ** (1 / |y|) * A` for a sequence `y` (GMPO, arXiv:2507.20673).

    Each token is clipped before the mean, in the logarithm. All tokens of the sequence have the same value, and the
    gradient reaches every token that is not clipped.
    """
    return -sequence_mean(clipped_log_ratio(inputs), inputs.mask).exp() * inputs.advantages


def gmpo_clipping(inputs: ObjectiveInputs) -> Clipping:
    """Return the tokens whose ratio a bound replaces."""
    log_ratio, advantages, config = inputs.log_ratio.detach(), inputs.advantages, inputs.config
    return Clipping(
        low=(advantages < 0) & (log_ratio < -config.ratio_clip_min),
        high=(advantages > 0) & (log_ratio > config.ratio_clip_max),
    )


def has_a_sequence_loss(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that the loss is a mean over sequences."""
    loss = config.loss_fn
    reason = "with loss_fn.objective gmpo: the one value of a sequence would count as often as it has tokens"
    if loss.token_level_loss:
        yield f"loss_fn.token_level_loss: got true, expected false {reason}"
    elif loss.length_normalizer is not None:
        yield f"loss_fn.length_normalizer: got {loss.length_normalizer}, expected null {reason}"


GMPO = Objective(
    "gmpo",
    gmpo,
    gmpo_clipping,
    bounds_weight=True,
    of_sequences=True,
    unread={"ratio_clip_c": "", "sequence_level_importance_ratios": ", which clips each token's ratio before the mean"},
    rules=(has_a_sequence_loss,),
)

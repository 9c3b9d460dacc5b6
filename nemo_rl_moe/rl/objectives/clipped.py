# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives of the probability ratio clipped to bounds (PPO, CISPO), and REINFORCE without a ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_moe.rl.objectives.interface import Clipping, Objective, ObjectiveInputs, RatioBounds

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig


def both_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Return the bounds `1 - ratio_clip_min` and `1 + ratio_clip_max` for every token, whatever its advantage."""
    return RatioBounds(
        advantages.new_full(advantages.shape, 1 - config.ratio_clip_min),
        advantages.new_full(advantages.shape, 1 + config.ratio_clip_max),
    )


def surrogate_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Return the effective bounds of the clipped surrogate, which depend on the sign of the advantage.

    PPO's `min(ratio * A, clip(ratio) * A)` (arXiv:1707.06347, eq. 7) only clips a ratio that has moved in the direction
    of the advantage. So there is only an upper bound for `A > 0`, and a lower bound for `A < 0`. Dual clip's
    `max(..., c * A)` for `A < 0` (arXiv:1912.09729) adds the upper bound `c`. With `A = 0` nothing is clipped.
    """
    both = both_bounds(advantages, config)
    upper_if_negative = float("inf") if config.ratio_clip_c is None else config.ratio_clip_c
    return RatioBounds(
        lower=both.lower.where(advantages < 0, 0.0),
        upper=both.upper.where(advantages > 0, float("inf")).masked_fill(advantages < 0, upper_if_negative),
    )


def clipped(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-clip(ratio) * A` (PPO, arXiv:1707.06347, eq. 7). A clipped token has no gradient."""
    return -surrogate_bounds(inputs.advantages, inputs.config).clip(inputs.ratio) * inputs.advantages


def surrogate_clipping(inputs: ObjectiveInputs) -> Clipping:
    """Return the tokens whose ratio the clipped surrogate replaces."""
    return surrogate_bounds(inputs.advantages, inputs.config).clipping(inputs.ratio.detach())


def cispo(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-clip(ratio) * A * logprob`. The clipped ratio has no gradient (CISPO of MiniMax-M1, arXiv:2506.13585).

    Every token keeps its gradient. There is no dual clip.
    """
    ratio = both_bounds(inputs.advantages, inputs.config).clip(inputs.ratio)
    return -ratio.detach() * inputs.advantages * inputs.logprobs


def cispo_clipping(inputs: ObjectiveInputs) -> Clipping:
    """Return the tokens whose ratio is out of the bounds, whatever their advantage."""
    return both_bounds(inputs.advantages, inputs.config).clipping(inputs.ratio.detach())


def reinforce(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-A * logprob`, without a ratio (REINFORCE, Williams 1992).

    If a step is one update, the gradient equals that of the other objectives.
    """
    return -inputs.advantages * inputs.logprobs


CLIPPED = Objective("clipped", clipped, surrogate_clipping, bounds_weight=True)
CISPO = Objective(
    "cispo",
    cispo,
    cispo_clipping,
    bounds_weight=True,
    unread={"ratio_clip_c": "", "sequence_level_importance_ratios": ", which weighs each token by its own ratio"},
)
REINFORCE = Objective(
    "reinforce",
    reinforce,
    unread={"ratio_clip_c": "", "sequence_level_importance_ratios": ", which has no ratio"},
)

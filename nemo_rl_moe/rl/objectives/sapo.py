# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""SAPO: a smooth gate of the ratio instead of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_moe.rl.objectives.interface import Objective, ObjectiveInputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def sapo(inputs: ObjectiveInputs) -> Float[Tensor, "sequences targets"]:
    """Return `-f(ratio) * A` with the gate `f(r) = 4 / tau * sigmoid(tau * (r - 1))` (SAPO, arXiv:2511.20347).

    The slope of the gate is 1 at `r = 1` and falls to 0 on both sides, faster for a larger temperature `tau`. It is
    `sapo_temperature_pos` for `A > 0`, and `sapo_temperature_neg` for other tokens.
    """
    config, advantages = inputs.config, inputs.advantages
    neg, pos = config.sapo_temperature_neg, config.sapo_temperature_pos
    temperature = advantages.new_full(advantages.shape, neg).masked_fill(advantages > 0, pos)
    return -4 / temperature * (temperature * (inputs.ratio - 1)).sigmoid() * advantages


SAPO = Objective(
    "sapo",
    sapo,
    bounds_weight=True,
    unread={"ratio_clip_c": "", "sequence_level_importance_ratios": ", which gates each token by its own ratio"},
)

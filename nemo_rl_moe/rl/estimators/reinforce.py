# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""REINFORCE without a baseline (Williams 1992): the advantage of a response is its reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs, rewards_are_not_scaled

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def reinforce_advantages(inputs: EstimatorInputs) -> Float[Tensor, "groups generations"]:
    """Return the rewards."""
    return inputs.rewards.clone()


REINFORCE = Estimator("reinforce", reinforce_advantages, baseline="none", rules=(rewards_are_not_scaled,))

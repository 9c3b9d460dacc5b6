# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""REINFORCE without a baseline (Williams 1992): the advantage of a response is its reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig


def reinforce_advantages(inputs: EstimatorInputs) -> Float[Tensor, "groups generations"]:
    """Return the rewards."""
    return inputs.rewards.clone()


def rewards_are_not_scaled(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that `normalize_rewards` is off."""
    if config.grpo.adv_estimator.normalize_rewards:
        yield (
            "grpo.adv_estimator.normalize_rewards: got true, expected false with grpo.adv_estimator.name reinforce,"
            " whose advantage is the reward itself; reinforce_plus_plus normalises over the step"
        )


REINFORCE = Estimator("reinforce", reinforce_advantages, baseline="none", rules=(rewards_are_not_scaled,))

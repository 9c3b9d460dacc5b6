# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ (arXiv:2501.03262), without and with the group's mean as baseline.

The paper computes mean and standard deviation over tokens. Here each response counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators.comparison import compare_within_groups, divide_by_spread_of_step
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def over_step(inputs: EstimatorInputs) -> Float[Tensor, "groups generations"]:
    """Return the differences of the rewards from the mean reward of the step.

    `normalize_rewards` divides by the sample standard deviation of the step's rewards. If all rewards are equal, the
    advantages are 0.
    """
    rewards, takes_part = inputs.rewards.reshape(1, -1), inputs.takes_part.reshape(1, -1)
    config = inputs.config
    advantages = compare_within_groups(rewards, takes_part, config, divides=config.normalize_rewards)
    return advantages.view_as(inputs.rewards)


def over_group_and_step(inputs: EstimatorInputs) -> Float[Tensor, "groups generations"]:
    """Return the differences of the rewards from the mean reward of their group.

    `normalize_rewards` divides by the sample standard deviation of all differences of the step. The mean of the
    differences need not be subtracted, since it is 0 in every group.
    """
    advantages = compare_within_groups(inputs.rewards, inputs.takes_part, inputs.config, divides=False)
    if not inputs.config.normalize_rewards:
        return advantages
    return divide_by_spread_of_step(advantages, advantages, inputs.takes_part)


REINFORCE_PLUS_PLUS = Estimator("reinforce_plus_plus", over_step, baseline="step")
REINFORCE_PLUS_PLUS_BASELINE = Estimator("reinforce_plus_plus_baseline", over_group_and_step)

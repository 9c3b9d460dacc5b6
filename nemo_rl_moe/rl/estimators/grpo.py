# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO: a response is compared with the other responses to its prompt (DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators.comparison import compare_within_groups, divide_by_spread_of_step
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def grpo_advantages(inputs: EstimatorInputs) -> Float[Tensor, "groups generations"]:
    """Return the differences of the rewards from the baseline of their group.

    `normalize_rewards` divides by the standard deviation of the group's rewards. With `normalize_over: batch` it
    divides by that of all rewards of the step (arXiv:2508.08221, sec. 4.1), so that groups whose rewards hardly differ
    are not amplified.
    """
    config, rewards, takes_part = inputs.config, inputs.rewards, inputs.takes_part
    over_step = config.normalize_over == "batch"
    divides = config.normalize_rewards and not over_step
    advantages = compare_within_groups(rewards, takes_part, config, divides=divides)
    if config.normalize_rewards and over_step:
        return divide_by_spread_of_step(advantages, rewards.double(), takes_part)
    return advantages


GRPO = Estimator("grpo", grpo_advantages, reads=frozenset({"use_leave_one_out_baseline", "normalize_over"}))

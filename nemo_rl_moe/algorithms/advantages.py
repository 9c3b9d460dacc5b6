# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""From the rewards of a step to its advantages, one for each response."""

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import AdvantageConfig

STANDARD_DEVIATION_FLOOR = 1e-6
"""Added to a standard deviation before anything is divided by it."""

EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards that lie no further apart than this, times the largest of them where that is above 1, are equal."""


def compute_advantages(
    rewards: Float[Tensor, "groups generations"], config: AdvantageConfig
) -> Float[Tensor, "groups generations"]:
    """How much better each response did than others.

    - `grpo`: than the group, the other responses to the same prompt. The baseline is the mean reward of the group
      (GRPO, arXiv:2402.03300) or, leaving one out, the mean of the group's other responses (RLOO, arXiv:2402.14740),
      which does not depend on the response that it is compared with. What leaving one out gives is the other times
      `n / (n - 1)`, with `n` generations a group. `normalize_rewards` divides by the sample standard deviation (ddof 1)
      of the whole group's rewards plus `STANDARD_DEVIATION_FLOOR`, with either baseline.
    - `reinforce_plus_plus`: than all responses of the batch (REINFORCE++, arXiv:2501.03262). The baseline is their
      mean, and `normalize_rewards` divides by their sample standard deviation plus the same floor. The paper takes
      both over tokens; here each response counts once.
    - `reinforce_plus_plus_baseline`: the group's mean is the baseline, and `normalize_rewards` divides by the sample
      standard deviation of all differences from it in the batch, plus the same floor (REINFORCE++ with baseline). Their
      mean needs no subtracting: it is 0 in every group.

    Where a group is the baseline, one whose rewards are all equal (see `informative_groups`) gets exactly 0, never
    rounding errors blown up; so does every response where all rewards of the batch are equal.

    Args:
        rewards: One number for each response, in at least two generations a group.
        config: The estimator and its switches.

    Returns:
        The advantages, of the rewards' type. They sum to 0 up to rounding: over every group, or over the batch for
        `reinforce_plus_plus`.

    Raises:
        ValueError: There is one generation a group, which can be compared with nothing.
    """
    if rewards.shape[1] < 2:
        raise ValueError(f"advantages compare at least two generations of a prompt, got {rewards.shape[1]}")
    # Float32 sums of a large batch would lose digits, and this is little work.
    exact = rewards.double()
    if config.name == "reinforce_plus_plus":
        # The whole batch is one group.
        exact = exact.view(1, -1)
    advantages = exact - exact.mean(dim=1, keepdim=True)
    if config.use_leave_one_out_baseline:
        advantages = advantages * (exact.shape[1] / (exact.shape[1] - 1))
    advantages = advantages.where(informative_groups(exact)[:, None], 0.0)
    if config.normalize_rewards:
        scale = advantages.std() if config.name == "reinforce_plus_plus_baseline" else exact.std(dim=1, keepdim=True)
        advantages = advantages / (scale + STANDARD_DEVIATION_FLOOR)
    return advantages.view_as(rewards).to(rewards.dtype)


def informative_groups(rewards: Float[Tensor, "groups generations"]) -> Bool[Tensor, " groups"]:
    """Which groups have something to learn from: their rewards differ.

    Sums of the same parts in another order differ in the last digits, so rewards count as equal when the largest and
    the smallest of the group lie at most `EQUAL_REWARDS_TOLERANCE * max(1, largest magnitude)` apart.
    """
    exact = rewards.double()
    spread = exact.amax(dim=1) - exact.amin(dim=1)
    magnitude = exact.abs().amax(dim=1).clamp(min=1.0)
    # Asked this way round, a group with a NaN is not taken for one that has nothing to teach.
    return ~(spread <= EQUAL_REWARDS_TOLERANCE * magnitude)


def frac_zero_std_groups(rewards: Float[Tensor, "groups generations"]) -> float:
    """Share of the groups whose rewards are all equal, which teach nothing."""
    return float((~informative_groups(rewards)).double().mean())

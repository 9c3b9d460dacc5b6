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
    """How much better each response did than the others to the same prompt.

    The baseline is the mean reward of the group (GRPO, arXiv:2402.03300) or, leaving one out, the mean of the group's
    other responses (RLOO, arXiv:2402.14740), which does not depend on the response that it is compared with. What
    leaving one out gives is the other times `n / (n - 1)`, with `n` generations a group.

    What `normalize_rewards` divides by:

    - `grpo`: the sample standard deviation (ddof 1) of the whole group's rewards plus `STANDARD_DEVIATION_FLOOR`, with
      either baseline; leaving one out scales the normalised advantages by `n / (n - 1)`.
    - `reinforce_plus_plus`: the sample standard deviation of all differences from the baseline in the batch, plus the
      same floor (REINFORCE++ with baseline, arXiv:2501.03262). Their mean needs no subtracting: it is 0 in every
      group. The factor of leaving one out cancels, so there it matters only without normalisation. The paper takes
      the mean over tokens; here each response counts once.

    A group whose rewards are all equal (see `informative_groups`) gets exactly 0, never rounding errors blown up.

    Args:
        rewards: One number for each response, in at least two generations a group.
        config: The estimator and its switches.

    Returns:
        The advantages, of the rewards' type; every group's sum to 0 up to rounding.

    Raises:
        ValueError: There is one generation a group, which can be compared with nothing.
    """
    generations = rewards.shape[1]
    if generations < 2:
        raise ValueError(f"advantages compare at least two generations of a prompt, got {generations}")
    # Float32 sums of a large batch would lose digits, and this is little work.
    exact = rewards.double()
    advantages = exact - exact.mean(dim=1, keepdim=True)
    if config.use_leave_one_out_baseline:
        advantages = advantages * (generations / (generations - 1))
    advantages = advantages.where(informative_groups(rewards)[:, None], 0.0)
    if config.normalize_rewards:
        scale = exact.std(dim=1, keepdim=True) if config.name == "grpo" else advantages.std()
        advantages = advantages / (scale + STANDARD_DEVIATION_FLOOR)
    return advantages.to(rewards.dtype)


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

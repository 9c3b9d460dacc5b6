# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparisons of rewards that the estimators share: within groups, and over a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from nemo_rl_moe.config.schema_grpo import AdvantageConfig

STANDARD_DEVIATION_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""
EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards are equal if they differ by at most this, times the largest magnitude of a reward if that is above 1."""


def informative_groups(rewards: Float[Tensor, "groups generations"]) -> Bool[Tensor, " groups"]:
    """Return which groups have rewards that differ. The other groups (zero variance) have no advantages.

    Sums of the same parts in another order differ in the last digits, so rewards count as equal if the largest and the
    smallest of the group differ by at most `EQUAL_REWARDS_TOLERANCE * max(1, largest magnitude)`.
    """
    exact = rewards.double()
    spread = exact.amax(dim=1) - exact.amin(dim=1)
    magnitude = exact.abs().amax(dim=1).clamp(min=1.0)
    # In this form, a group with a NaN does not count as zero variance.
    return ~(spread <= EQUAL_REWARDS_TOLERANCE * magnitude)


def compare_within_groups(
    rewards: Float[Tensor, "groups generations"],
    takes_part: Bool[Tensor, "groups generations"],
    config: AdvantageConfig,
    *,
    divides: bool,
) -> Float[Tensor, "groups generations"]:
    """Return the difference of each response's reward from the baseline of its group.

    The baseline is the mean reward of the group (GRPO, arXiv:2402.03300). With `use_leave_one_out_baseline` it is the
    mean of the group's other responses (RLOO, arXiv:2402.14740), and so independent of the response. Leaving one out
    multiplies the difference by `n / (n - 1)`, with `n` generations per group. A group whose rewards are all equal gets
    exactly 0 instead of amplified rounding errors.

    Args:
        rewards: Reward of each response. Not read for responses that do not take part.
        takes_part: True for responses to compare.
        divides: Whether to divide by the sample standard deviation of the group (ddof 1) plus
            `STANDARD_DEVIATION_FLOOR`.

    Returns:
        The differences in float64. Responses that do not take part, or that have no other response to compare with, get
        0.

    Raises:
        ValueError: A group has a single generation.
    """
    # Float32 sums of a large batch would lose digits, and this is little work.
    exact = rewards.double()
    if exact.shape[1] < 2:
        raise ValueError(f"advantages compare at least two generations of a prompt, got {exact.shape[1]}")
    differences, counts = exact.new_zeros(exact.shape), takes_part.sum(dim=1)
    for size in counts[counts > 1].unique().tolist():
        chosen = takes_part & (counts == size)[:, None]
        of_size = _differences(exact[chosen].view(-1, size), config, divides=divides)
        differences[chosen] = of_size.reshape(-1)
    return differences


def _differences(
    rewards: Float[Tensor, "groups generations"], config: AdvantageConfig, *, divides: bool
) -> Float[Tensor, "groups generations"]:
    differences = rewards - rewards.mean(dim=1, keepdim=True)
    if config.use_leave_one_out_baseline:
        differences = differences * (rewards.shape[1] / (rewards.shape[1] - 1))
    differences = differences.where(informative_groups(rewards)[:, None], 0.0)
    return differences / (rewards.std(dim=1, keepdim=True) + STANDARD_DEVIATION_FLOOR) if divides else differences


def divide_by_spread_of_step(
    advantages: Float[Tensor, "groups generations"],
    values: Float[Tensor, "groups generations"],
    takes_part: Bool[Tensor, "groups generations"],
) -> Float[Tensor, "groups generations"]:
    """Return advantages divided by the sample standard deviation of all `values` of a step.

    `STANDARD_DEVIATION_FLOOR` is added to the deviation. Values of responses that are alone in their group do not
    count.
    """
    compared = takes_part & (takes_part.sum(dim=1) > 1)[:, None]
    return advantages / (values[compared].std() + STANDARD_DEVIATION_FLOOR) if bool(compared.any()) else advantages

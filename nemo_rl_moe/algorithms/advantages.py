# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages from the rewards of a step, one for each response, and the shaping of the rewards before."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.algorithms.own_advantages import own_advantages
from nemo_rl_moe.config.schema_grpo import AdvantageConfig, RewardShapingConfig
from nemo_rl_moe.config.user_code import is_own
from nemo_rl_moe.rollouts.source import informative_groups


def shape_rewards(
    rewards: Float[Tensor, "*responses"],
    response_lengths: Int[Tensor, "*responses"],
    max_new_tokens: int,
    config: RewardShapingConfig,
) -> Float[Tensor, "*responses"]:
    """Soft punishment of long responses (DAPO, arXiv:2503.14476, eq. 13).

    A response may have `max_new_tokens - overlong_buffer_length` tokens for nothing. Each one more costs
    `overlong_buffer_penalty / overlong_buffer_length`, up to the whole penalty at `max_new_tokens`.

    Args:
        rewards: One for each response.
        response_lengths: Generated tokens of each, its end token included.
        max_new_tokens: Most tokens that a response can have.
        config: The punishment; not enabled, the rewards are returned as they are.

    Returns:
        New rewards, of the same type.
    """
    if not config.enabled:
        return rewards
    tokens_for_nothing = max_new_tokens - config.overlong_buffer_length
    share_of_buffer = (response_lengths.to(rewards.dtype) - tokens_for_nothing) / config.overlong_buffer_length
    return rewards - config.overlong_buffer_penalty * share_of_buffer.clamp(0.0, 1.0)


STANDARD_DEVIATION_FLOOR = 1e-6
"""Added to a standard deviation before anything is divided by it."""


def compute_advantages(
    rewards: Float[Tensor, "groups generations"],
    config: AdvantageConfig,
    takes_part: Bool[Tensor, "groups generations"] | None = None,
) -> Float[Tensor, "groups generations"]:
    """Advantages of responses over others.

    - `package.module:function`: what the user's own function returns (`own_advantages`).
    - `reinforce`: than nothing: the reward itself (REINFORCE, Williams 1992, without a baseline).
    - `grpo`: than the group, the other responses to the same prompt. The baseline is the mean reward of the group
      (GRPO, arXiv:2402.03300) or, leaving one out, the mean of the group's other responses (RLOO, arXiv:2402.14740),
      which does not depend on the response that it is compared with. What leaving one out gives is the other times
      `n / (n - 1)`, with `n` generations a group. `normalize_rewards` divides by a sample standard deviation (ddof 1)
      plus `STANDARD_DEVIATION_FLOOR`, with either baseline: that of the whole group's rewards or, with `normalize_over:
      batch`, of all rewards of the batch (arXiv:2508.08221, sec. 4.1), so that a group whose rewards hardly differ is
      not blown up to the size of the others.
    - `gdpo`: than the group, as `grpo`, of one of several rewards; see `decoupled_advantages`.
    - `reinforce_plus_plus`: than all responses of the batch (REINFORCE++, arXiv:2501.03262). The baseline is their
      mean, and `normalize_rewards` divides by their sample standard deviation plus the same floor. The paper takes
      both over tokens; here each response counts once.
    - `reinforce_plus_plus_baseline`: the group's mean is the baseline, and `normalize_rewards` divides by the sample
      standard deviation of all differences from it in the batch, plus the same floor (REINFORCE++ with baseline). Their
      mean needs no subtracting: it is 0 in every group.

    Where a group is the baseline, one whose rewards are all equal (see `informative_groups`) gets exactly 0, never
    rounding errors blown up; so does every response where all rewards of the batch are equal.

    Args:
        rewards: One number for each response, in at least two generations a group; for `reinforce_plus_plus`, at least
            two in all; for `reinforce`, any number.
        config: The estimator and its switches.
        takes_part: Responses that are compared; the rewards of others are not read. None: all.

    Returns:
        The advantages, of the rewards' type; 0 of responses that take no part. They sum to 0 up to rounding: over every
        group, or over the batch for `reinforce_plus_plus`; those of `reinforce` sum to what the rewards do.

    Raises:
        ValueError: A response can be compared with nothing.
    """
    present = torch.ones_like(rewards, dtype=torch.bool) if takes_part is None else takes_part
    if is_own(config.name):
        return own_advantages(_with_means(rewards, present), config).where(present, 0.0)
    if config.name == "reinforce":
        return rewards.where(present, 0.0)
    # Float32 sums of a large batch would lose digits, and this is little work.
    exact = rewards.double()
    if config.name == "reinforce_plus_plus":
        # The whole batch is one group.
        exact, present = exact.reshape(1, -1), present.reshape(1, -1)
    if exact.shape[1] < 2:
        raise ValueError(f"advantages compare at least two generations of a prompt, got {exact.shape[1]}")
    of_step = config.name == "reinforce_plus_plus_baseline" or config.normalize_over == "batch"
    advantages, counts = torch.zeros_like(exact), present.sum(dim=1)
    for size in counts[counts > 1].unique().tolist():
        chosen = present & (counts == size)[:, None]
        scale_of_group = config.normalize_rewards and not of_step
        advantages[chosen] = _within_groups(exact[chosen].view(-1, size), config, divides=scale_of_group).reshape(-1)
    if config.normalize_rewards and of_step and bool((counts > 1).any()):
        compared = present & (counts > 1)[:, None]
        values = advantages if config.name == "reinforce_plus_plus_baseline" else exact
        advantages = advantages / (values[compared].std() + STANDARD_DEVIATION_FLOOR)
    return advantages.view_as(rewards).to(rewards.dtype)


def _within_groups(
    rewards: Float[Tensor, "groups generations"], config: AdvantageConfig, *, divides: bool
) -> Float[Tensor, "groups generations"]:
    """Return differences from each group's baseline, 0 where its rewards are equal, divided by its spread or not."""
    differences = rewards - rewards.mean(dim=1, keepdim=True)
    if config.use_leave_one_out_baseline:
        differences = differences * (rewards.shape[1] / (rewards.shape[1] - 1))
    differences = differences.where(informative_groups(rewards)[:, None], 0.0)
    return differences / (rewards.std(dim=1, keepdim=True) + STANDARD_DEVIATION_FLOOR) if divides else differences


def _with_means(
    rewards: Float[Tensor, "groups generations"], present: Bool[Tensor, "groups generations"]
) -> Float[Tensor, "groups generations"]:
    """Return rewards with the mean of its group in place of each absent one, and that of the step in empty groups."""
    if bool(present.all()):
        return rewards
    counted = rewards.where(present, 0.0)
    means = counted.sum(dim=1, keepdim=True) / present.sum(dim=1, keepdim=True).clamp(min=1)
    of_step = counted.sum() / present.sum().clamp(min=1)
    return rewards.where(present, means.where(present.any(dim=1, keepdim=True), of_step))


def decoupled_advantages(
    rewards: Float[Tensor, "names groups generations"],
    weights: Sequence[float],
    config: AdvantageConfig,
    takes_part: Bool[Tensor, "groups generations"] | None = None,
) -> Float[Tensor, "groups generations"]:
    """Advantages of several rewards, each compared within its group before they are added up (GDPO, arXiv:2601.05242).

    The weighted sum of each reward's own advantages, divided by its sample standard deviation over the batch plus
    `STANDARD_DEVIATION_FLOOR`. Its mean needs no subtracting: it is 0 in every group. Responses whose different rewards
    add up to the same have the same advantage by the estimator `grpo`, and different ones here.

    Args:
        rewards: At least two generations a group.
        weights: Of each name.
        config: The estimator `gdpo` and its switches.
        takes_part: As of `compute_advantages`.

    Returns:
        The advantages, of the rewards' type; 0 where no reward differs within any group.

    Raises:
        ValueError: A response can be compared with nothing.
    """
    parts = (compute_advantages(values, config, takes_part) for values in rewards.double())
    total = torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum(dim=0)
    compared = total if takes_part is None else total[takes_part]
    if compared.numel() < 2:
        return torch.zeros_like(rewards[0])
    return (total / (compared.std() + STANDARD_DEVIATION_FLOOR)).to(rewards.dtype)


def clip_advantages(
    advantages: Float[Tensor, "groups generations"], low: float | None, high: float | None
) -> Float[Tensor, "groups generations"]:
    """Advantages held between two bounds, of which either may be None; NaN stays NaN."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def frac_zero_std_groups(rewards: Float[Tensor, "groups generations"]) -> float:
    """Share of the groups whose rewards are all equal, which teach nothing."""
    return float((~informative_groups(rewards)).double().mean())

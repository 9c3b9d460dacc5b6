# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxRL: the advantage of a response is relative to the mean reward of its group (arXiv:2602.02710)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rl.estimators.comparison import compare_within_groups
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs, rewards_are_not_scaled

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig


def maxrl_advantages(inputs: EstimatorInputs) -> Float[Tensor, "groups generations"]:
    """Return `(R - mean R) / mean R`, with means over the group. A group without a reward above 0 has 0.

    With `N` responses of which `K` have reward 1 and the others 0, `(1 / N) sum_i A_i grad log pi(y_i)` is the mean of
    `grad log pi` over the `K` right responses, minus that over all responses as a control variate. As `K = 0` gives 0,
    its expectation is the gradient of `-sum_{k < N} (1 - p)^k / k`, the first `N - 1` terms of `log p`, for the chance
    `p` of a right response.

    Raises:
        ConfigurationError: A reward is negative, so that the mean is no measure of success.
    """
    takes_part = inputs.takes_part
    rewards = inputs.rewards.double().where(takes_part, 0.0)
    if bool((rewards < 0).any()):
        raise ConfigurationError(
            f"grpo.adv_estimator.name: got maxrl and a reward of {float(rewards.min()):g}, expected rewards of 0 or"
            " more, of which a group's mean is the share of right responses"
        )
    means = rewards.sum(dim=1, keepdim=True) / takes_part.sum(dim=1, keepdim=True).clamp(min=1)
    differences = compare_within_groups(rewards, takes_part, inputs.config, divides=False)
    return differences / means.where(means > 0, 1.0)


def rewards_are_not_lowered(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that no setting makes rewards negative."""
    from nemo_rl_moe.config.schema_mixture import environment_key  # imports this module

    reason = "with grpo.adv_estimator.name maxrl, which divides by the mean reward: a {} could make it negative"
    penalty = reason.format("penalty")
    for key, is_on in (
        ("grpo.reward_shaping.enabled", config.grpo.reward_shaping.enabled),
        ("loss_fn.use_kl_in_reward", config.loss_fn.use_kl_in_reward),
    ):
        if is_on:
            yield f"{key}: got true, expected false {penalty}"
    if config.reward_model is not None and config.reward_model.weight:
        weight = config.reward_model.weight
        yield f"reward_model: got weight {weight:g}, expected null, or weight 0, {reason.format('score')}"
    for name, env in config.env.environments.items():
        section = environment_key(name)
        for reward, weight in (env.reward_weights or {}).items():
            if weight < 0:
                yield f"{section}.reward_weights.{reward}: got {weight:g}, expected 0 or more {penalty}"
        if env.driver.kind == "tools" and env.driver.call_cost:
            yield f"{section}.driver.call_cost: got {env.driver.call_cost:g}, expected 0 {penalty}"


MAXRL = Estimator("maxrl", maxrl_advantages, rules=(rewards_are_not_scaled, rewards_are_not_lowered))

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GDPO: several named rewards, each compared within its group before they are added (arXiv:2601.05242)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl_moe.rl.estimators.comparison import STANDARD_DEVIATION_FLOOR, compare_within_groups, informative_groups
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from nemo_rl_moe.config.schema import GRPOMasterConfig


def gdpo_advantages(inputs: EstimatorInputs) -> Float[Tensor, "groups generations"]:
    """Return the weighted sum of the advantages of each reward, divided by the sum's standard deviation over the step.

    The mean of the sum need not be subtracted, since it is 0 in every group. Responses with different rewards but the
    same sum of rewards have equal advantages with the estimator `grpo`, but not here. All advantages are 0 if no reward
    differs in any group.
    """
    import torch

    config, takes_part = inputs.config, inputs.takes_part
    parts = [
        inputs.reward_weights[name]
        * compare_within_groups(rewards, takes_part, config, divides=config.normalize_rewards)
        for name, rewards in _weighted(inputs).items()
    ]
    total = torch.stack(parts).sum(dim=0)
    compared = total[takes_part]
    return total / (compared.std() + STANDARD_DEVIATION_FLOOR) if compared.numel() > 1 else total.zero_()


def any_reward_differs(inputs: EstimatorInputs) -> Bool[Tensor, " groups"]:
    """Return which groups have responses that differ in a reward with a weight other than 0."""
    import torch

    return torch.stack([informative_groups(rewards) for rewards in _weighted(inputs).values()]).any(dim=0)


def _weighted(inputs: EstimatorInputs) -> dict[str, Float[Tensor, "groups generations"]]:
    return {name: rewards for name, rewards in inputs.named_rewards.items() if inputs.reward_weights[name]}


def rewards_are_named(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that there are named rewards, and that no setting changes only their sum, such as reward shaping."""
    reason = "with grpo.adv_estimator.name gdpo, which compares each named reward separately"
    if all(env.reward_weights is None for env in config.env.environments.values()):
        yield f"env.reward_weights: got null, expected a weight for each reward {reason}"
    for key, is_on in (
        ("grpo.reward_shaping.enabled", config.grpo.reward_shaping.enabled),
        ("loss_fn.use_kl_in_reward", config.loss_fn.use_kl_in_reward),
    ):
        if is_on:
            yield f"{key}: got true, expected false {reason}: there is no single reward to change"


def rewards_are_shared(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that all environments of a mixture have the same named rewards, as each is normalised over the step."""
    mixture = config.env.mixture
    if mixture and config.env.shared_reward_weights is None:
        yield (
            "grpo.adv_estimator.name: got gdpo, which normalises each named reward over the step; expected another, or"
            f" the same reward_weights in all environments of env.mixture: {', '.join(mixture)}"
        )


GDPO = Estimator(
    "gdpo",
    gdpo_advantages,
    reads=frozenset({"use_leave_one_out_baseline"}),
    reads_named_rewards=True,
    is_informative=any_reward_differs,
    rules=(rewards_are_named, rewards_are_shared),
)

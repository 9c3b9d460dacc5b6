# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages of bare rewards, by the estimator that a section names."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_rl_moe.algorithms.advantages import compute_advantages
from nemo_rl_moe.algorithms.custom_estimator import find_estimator
from nemo_rl_moe.config.schema_grpo import AdvantageConfig
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs


def inputs_of_rewards(
    rewards: Tensor, config: AdvantageConfig, named: Mapping[str, tuple[float, Tensor]] | None = None
) -> EstimatorInputs:
    """Return the inputs of responses of three tokens each, none of which failed.

    Args:
        rewards: Of each response, one row a group.
        config: The section.
        named: Weight and rewards of each name.
    """
    return EstimatorInputs(
        rewards=rewards,
        takes_part=torch.ones_like(rewards, dtype=torch.bool),
        config=config,
        named_rewards={name: values for name, (_, values) in (named or {}).items()},
        reward_weights={name: weight for name, (weight, _) in (named or {}).items()},
        group_ids=tuple(f"group:{number}" for number in range(len(rewards))),
        num_tokens=torch.full(rewards.shape, 3),
        token_mask=torch.ones(*rewards.shape, 3, dtype=torch.bool),
        token_turns=torch.zeros(*rewards.shape, 3, dtype=torch.long),
        turn_rewards=torch.zeros(*rewards.shape, 1, dtype=torch.float64),
    )


def advantages_of_rewards(rewards: Tensor, config: AdvantageConfig) -> Tensor:
    return compute_advantages(find_estimator(config.name), inputs_of_rewards(rewards, config))


def advantages_of_named(named: Tensor, weights: Sequence[float], config: AdvantageConfig) -> Tensor:
    """Return the advantages of several rewards, `[names, groups, generations]`."""
    pairs = {f"reward_{place}": pair for place, pair in enumerate(zip(weights, named, strict=True))}
    return compute_advantages(find_estimator(config.name), inputs_of_rewards(named.sum(dim=0), config, pairs))

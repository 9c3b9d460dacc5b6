# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between the reward model and the other rewards. See `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.environments.rewards import RewardModelAloneConfig
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_mixture import environment_key
from nemo_rl_moe.config.schema_run import REWARD_MODEL_ROLE


def environment_has_its_reward_model(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that there is a reward model if an environment relies on it alone."""
    by_model = [
        environment_key(name)
        for name, env in config.env.environments.items()
        if isinstance(env.reward, RewardModelAloneConfig)
    ]
    if not by_model:
        return
    with_it = f"with {by_model[0]}.reward.kind {REWARD_MODEL_ROLE}"
    if config.reward_model is None:
        yield (
            "reward_model: got null, expected a section with model_name, adapter, logprob_batch_size, megatron_cfg and"
            f" weight {with_it}"
        )
    elif config.reward_model.weight == 0:
        yield f"reward_model.weight: got 0, expected another number {with_it}, since nothing else gives a reward"


def reward_model_has_its_name(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that no named reward has the name of the reward model's score."""
    if config.reward_model is None:
        return
    for name, env in config.env.environments.items():
        if REWARD_MODEL_ROLE in (env.reward_weights or {}):
            yield (
                f"{environment_key(name)}.reward_weights.{REWARD_MODEL_ROLE}: expected another name: this is the name"
                " of the reward model's score, whose weight is reward_model.weight"
            )


REWARD_MODEL_RULES = (environment_has_its_reward_model, reward_model_has_its_name)

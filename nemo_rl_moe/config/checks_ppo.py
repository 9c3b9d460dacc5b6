# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings of PPO and its critic. See `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from nemo_rl_moe.rl.estimators.gae import GAE

_ESTIMATOR = "grpo.adv_estimator.name"


def gae_has_a_critic(config: GRPOMasterConfig) -> Iterator[str]:
    """Check that an algorithm without a critic has an estimator that needs none."""
    if config.grpo.adv_estimator.name == GAE.name:
        yield f"{_ESTIMATOR}: got {GAE.name}, expected an estimator that needs no critic; the algorithm ppo has one"


def critic_makes_the_advantages(config: PPOMasterConfig) -> Iterator[str]:
    """Check that the estimator is GAE, the only one that PPO uses."""
    if (name := config.grpo.adv_estimator.name) != GAE.name:
        yield f"{_ESTIMATOR}: got {name}, expected {GAE.name} with the algorithm ppo, whose critic makes the advantages"


def policy_trains_after_all(config: PPOMasterConfig) -> Iterator[str]:
    """Check that the critic does not train alone in all steps. With asynchronous rollouts, it must not train alone in
    any step, because their age is measured in updates of the policy."""
    start, last = config.ppo.policy_training_start_step, config.grpo.max_num_steps
    key = "ppo.policy_training_start_step"
    if start and last is not None and start >= last:
        yield f"{key}: got {start}, expected less than grpo.max_num_steps = {last}: the policy would never train"
    if start and config.grpo.rollouts.is_asynchronous:
        yield (
            f"{key}: got {start}, expected 0 with grpo.rollouts.mode asynchronous, which counts the age of rollouts in"
            " updates of the policy"
        )


PPO_RULES = (critic_makes_the_advantages, policy_trains_after_all)

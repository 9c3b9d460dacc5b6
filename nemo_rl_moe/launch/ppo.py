# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of PPO: that of GRPO, with a critic."""

from collections.abc import Callable

from nemo_rl_moe.algorithms.critic import Critic
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from nemo_rl_moe.config.schema_run import CRITIC_ROLE
from nemo_rl_moe.launch.grpo import run_grpo
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.models.interfaces import Head


def run_ppo(config: PPOMasterConfig, run: TrainingRun) -> None:
    """Run PPO from start to end.

    Raises:
        UserError: A model, the tokenizer, the environment or the prompts cannot be used.
        WorkerDiedError: A worker failed.
    """

    def prepare_critic() -> Callable[[], Critic]:
        model = run.prepare_role(CRITIC_ROLE)
        return lambda: Critic(config, run.start_trainable_role(CRITIC_ROLE, model, heads=[Head.VALUE]))

    run_grpo(config, run, prepare_critic)

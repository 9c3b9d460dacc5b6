# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of PPO: GRPO with a critic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.critic import Critic
from nemo_rl_moe.algorithms.role_models import RoleModels
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from nemo_rl_moe.config.schema_run import CRITIC_ROLE
from nemo_rl_moe.launch.grpo import PreparedRoles, run_grpo
from nemo_rl_moe.launch.setup import PreparedModel
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.models.interfaces import Head

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


def run_ppo(config: PPOMasterConfig, run: TrainingRun) -> None:
    """Run PPO from start to end."""
    run_grpo(config, run, lambda prepared: PreparedCritic(config, run, run.prepare_role(CRITIC_ROLE)))


@dataclass(frozen=True)
class PreparedCritic(PreparedRoles):
    """The critic of a run. It is checked before any worker starts."""

    config: PPOMasterConfig
    run: TrainingRun
    model: PreparedModel

    def start(self, policy: "MegatronPolicy") -> tuple[RoleModels, Sequence[RunObserver]]:
        started = self.run.start_trainable_role(CRITIC_ROLE, self.model, heads=[Head.VALUE])
        return RoleModels(critic=Critic(self.config, started)), ()

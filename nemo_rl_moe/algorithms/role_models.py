# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Other models in a step of GRPO: a critic makes it PPO, teachers make it distillation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.critic import Critic
from nemo_rl_moe.algorithms.distillation import Teachers
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import LossFunction
from nemo_rl_moe.rollouts.source import RolloutGroups

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


@dataclass(frozen=True)
class RoleModels:
    """Models other than the policy that take part in a step.

    Attributes:
        critic: Model that computes the advantages instead of the estimator, and trains on the returns before the policy
            does.
        teachers: Models that score responses for a loss of distillation.
    """

    critic: Critic | None = None
    teachers: Teachers | None = None

    def before_update(
        self, policy: "MegatronPolicy", groups: RolloutGroups, batch: TokenBatch, clock: PhaseClock
    ) -> tuple[TokenBatch, dict[str, float]]:
        """Return the batch with the models' results, and metrics, after training the critic."""
        metrics: dict[str, float] = {}
        if self.critic is not None:
            batch, found = self.critic.with_advantages(groups, batch, clock)
            metrics |= found | self.critic.train(batch, clock)
        if self.teachers is not None:
            batch, found = self.teachers.with_scores(policy, batch, groups.trained, clock)
            metrics |= found
        return batch, metrics

    def train_policy(self, step: int) -> bool:
        """Return whether the policy trains in a step, counted from 1."""
        return self.critic is None or self.critic.trains_policy(step)

    def loss(self, of_rewards: PolicyGradientLoss) -> LossFunction:
        """Return the policy's loss: the distillation loss if there are teachers, else `of_rewards`."""
        return of_rewards if self.teachers is None else self.teachers.loss(of_rewards)


NO_ROLES = RoleModels()

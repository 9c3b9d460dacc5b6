# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Treatment of responses that the environment failed to score: which ones are compared and trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_environment import OnFailure
from nemo_rl_moe.rollouts.trajectory import Trajectory


def scored_responses(trajectories: Sequence[Trajectory], num_generations: int) -> Bool[Tensor, "groups generations"]:
    """Return which responses the environment has scored, one row per group."""
    scored = [trajectory.fault is None for trajectory in trajectories]
    return torch.tensor(scored, dtype=torch.bool).view(-1, num_generations)


@dataclass(frozen=True)
class FailureRule:
    """Treatment of failed responses in the groups of a step, so that a failure is never better than an answer.

    Its methods take trajectories group after group. All trajectories of a group have the same environment.

    Attributes:
        on_failure: Name of an environment -> its `env.on_failure`.
        fewest_of_group: Fewest scored responses of a group. A group with fewer is omitted, unless failed responses
            count as zero or lowest.
        fewest_of_step: Fewest responses of a step that take part. With fewer, only groups take part in which failed
            responses count as zero or lowest.
        leave_truncated: Names of environments that give truncated responses reward 0 without scoring them.
    """

    on_failure: Mapping[str, OnFailure]
    fewest_of_group: int
    fewest_of_step: int
    leave_truncated: frozenset[str] = frozenset()

    def of(self, trajectory: Trajectory) -> OnFailure:
        """Return the treatment of a failed trajectory."""
        return self.on_failure[trajectory.environment]

    def taking_part(
        self, trajectories: Sequence[Trajectory], num_generations: int
    ) -> Bool[Tensor, "groups generations"]:
        """Return which responses are compared with others and trained on."""
        is_scored = scored_responses(trajectories, num_generations)
        counts = is_scored.sum(dim=1, keepdim=True)
        as_zero, as_lowest = (self._groups_of(name, trajectories, num_generations) for name in ("zero", "lowest"))
        found = as_zero | as_lowest & (counts > 0) | is_scored & (counts >= self.fewest_of_group)
        return found if found.sum() >= self.fewest_of_step else found & (as_zero | as_lowest)

    def filled(
        self, rewards: Float[Tensor, "groups generations"], trajectories: Sequence[Trajectory]
    ) -> Float[Tensor, "groups generations"]:
        """Return rewards in which a failed response has the lowest scored reward of its group.

        It has 0 if `env.on_failure` is `zero`, or if the group has no scored response.
        """
        num_generations = rewards.shape[1]
        is_scored = scored_responses(trajectories, num_generations)
        lowest = rewards.masked_fill(~is_scored, float("inf")).amin(dim=1, keepdim=True)
        lowest = lowest.where(is_scored.any(dim=1, keepdim=True), 0.0)
        return rewards.where(is_scored | self._groups_of("zero", trajectories, num_generations), lowest)

    def held_down(
        self, advantages: Float[Tensor, "groups generations ..."], trajectories: Sequence[Trajectory]
    ) -> Float[Tensor, "groups generations ..."]:
        """Return advantages, clamped to at most 0 for failed responses.

        This is needed because a baseline other than the mean of the group can make these advantages positive.
        """
        num_generations = advantages.shape[1]
        may_gain = scored_responses(trajectories, num_generations)
        may_gain = may_gain | self._groups_of("zero", trajectories, num_generations)
        of_each = may_gain.view(*may_gain.shape, *[1] * (advantages.ndim - 2))
        return advantages.where(of_each, advantages.clamp(max=0.0))

    def counted(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories whose rewards count in metrics: scored ones, and failed ones that get reward 0."""
        return [found for found in trajectories if found.fault is None or self.of(found) == "zero"]

    def unscored_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the share of trajectories that got reward 0 without a score. Empty if all environments score all."""
        if not any(found.environment in self.leave_truncated for found in trajectories):
            return {}
        unscored = [
            found.is_truncated and found.reward == 0 and found.environment in self.leave_truncated
            for found in trajectories
        ]
        return {"truncation_rate_unscored": sum(unscored) / len(trajectories)}

    def _groups_of(
        self, on_failure: OnFailure, trajectories: Sequence[Trajectory], num_generations: int
    ) -> Bool[Tensor, "groups 1"]:
        """Return which groups have an environment with this treatment."""
        found = [self.of(first) == on_failure for first in trajectories[::num_generations]]
        return torch.tensor(found, dtype=torch.bool)[:, None]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses that the environment failed to score: which of a step's responses are compared and trained on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_environment import OnFailure
from nemo_rl_moe.rollouts.trajectory import Trajectory


def scored_responses(trajectories: Sequence[Trajectory], num_generations: int) -> Bool[Tensor, "groups generations"]:
    """Return which responses have a score of the environment, one row a group."""
    scored = [trajectory.fault is None for trajectory in trajectories]
    return torch.tensor(scored, dtype=torch.bool).view(-1, num_generations)


@dataclass(frozen=True)
class FailureRule:
    """Treatment of failed responses in the groups of a step, so that failing is never better than an answer.

    Attributes:
        on_failure: As `env.on_failure`.
        fewest_of_group: Scored responses below which a group is left out, where failed ones are.
        fewest_of_step: Scored responses below which the whole step is left out, where failed ones are.
    """

    on_failure: OnFailure
    fewest_of_group: int
    fewest_of_step: int

    def taking_part(self, is_scored: Bool[Tensor, "groups generations"]) -> Bool[Tensor, "groups generations"]:
        """Return which responses are compared with others and trained on."""
        if self.on_failure == "zero":
            return torch.ones_like(is_scored)
        counts = is_scored.sum(dim=1, keepdim=True)
        if self.on_failure == "lowest":
            return (counts > 0).expand_as(is_scored)
        found = is_scored & (counts >= self.fewest_of_group)
        return found if found.sum() >= self.fewest_of_step else torch.zeros_like(found)

    def filled(
        self, rewards: Float[Tensor, "groups generations"], is_scored: Bool[Tensor, "groups generations"]
    ) -> Float[Tensor, "groups generations"]:
        """Return rewards with the lowest scored one of its group in place of each failed response's; 0 without any."""
        if self.on_failure == "zero":
            return rewards
        lowest = rewards.masked_fill(~is_scored, float("inf")).amin(dim=1, keepdim=True)
        return rewards.where(is_scored, lowest.where(is_scored.any(dim=1, keepdim=True), 0.0))

    def held_down(
        self, advantages: Float[Tensor, "groups generations"], is_scored: Bool[Tensor, "groups generations"]
    ) -> Float[Tensor, "groups generations"]:
        """Return advantages without positive ones of failed responses, which a baseline beyond the group can give."""
        return advantages if self.on_failure == "zero" else advantages.where(is_scored, advantages.clamp(max=0.0))

    def counted(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the trajectories whose rewards count in metrics."""
        return [found for found in trajectories if found.fault is None or self.on_failure == "zero"]

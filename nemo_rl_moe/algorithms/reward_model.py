# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward model: a sequence classifier. Its score of a trajectory is added to the trajectory's reward."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING

import torch

from nemo_rl_moe.config.schema_run import REWARD_MODEL_ROLE
from nemo_rl_moe.data.scored_pairs import scored_length
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.rewards.interface import Fault, Score, checked_score
from nemo_rl_moe.rollouts.trajectory import Trajectory

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.model_workers import ModelWorkers


@dataclass(frozen=True)
class RewardModel:
    """Reward model of a run.

    Attributes:
        weight: Factor of the score in the reward.
        pad_token_id: Padding token. The score is taken at the last token that is not this one, as classifiers of
            transformers do, also in their training. If it is None, the score is taken at the last token.
    """

    model: "ModelWorkers"
    weight: float
    pad_token_id: int | None
    _one_at_a_time: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add_rewards(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return trajectories with the weighted score added to the reward, and the score as the named reward
        `reward_model`.

        The sequence with the last response is scored. Trajectories that their environment failed to score stay
        unchanged. If a score is NaN or too large, its trajectory is returned with a fault and without rewards. Several
        threads may call this method.
        """
        scored = [trajectory for trajectory in trajectories if trajectory.fault is None]
        if not scored:
            return list(trajectories)
        with self._one_at_a_time:  # the ranks need their collectives in the same order
            scores = self.model.scores(self.batch_of(scored)).double().tolist()
        found = iter(scores)
        return [
            trajectory if trajectory.fault is not None else self._with_score(trajectory, next(found))
            for trajectory in trajectories
        ]

    def batch_of(self, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Return a batch of the sequences with the last responses, each up to the token at which its score is taken."""
        sequences = [trajectory.last_sequence for trajectory in trajectories]
        shape = (len(sequences), max(map(len, sequences)))
        input_ids = torch.zeros(shape, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            input_ids[row, : len(sequence)] = torch.as_tensor(sequence.token_ids)
        return TokenBatch(
            input_ids=input_ids,
            lengths=torch.tensor([scored_length(sequence.token_ids, self.pad_token_id) for sequence in sequences]),
            token_mask=torch.zeros(shape, dtype=torch.bool),
            sample_ids=tuple(trajectory.sample_id for trajectory in trajectories),
        ).with_inputs([sequence.model_inputs for sequence in sequences])

    def _with_score(self, trajectory: Trajectory, score: float) -> Trajectory:
        checked = checked_score(Score(trajectory.reward + self.weight * score, trajectory.is_correct))
        if checked.fault is not None:
            return replace(
                trajectory,
                reward=0.0,
                is_correct=False,
                fault=Fault.ERROR,
                fault_message=f"{REWARD_MODEL_ROLE}: {checked.message}",
                rewards={},
                turn_rewards=(),
            )
        return replace(trajectory, reward=checked.reward, rewards={**trajectory.rewards, REWARD_MODEL_ROLE: score})

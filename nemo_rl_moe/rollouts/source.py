# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout sources, which supply the groups of trajectories of each training step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.trajectory import Trajectory

# Part of a seed key, so that training and validation never share random numbers.
TRAINING_SEEDS, VALIDATION_SEEDS = 0, 1


@dataclass(frozen=True)
class RolloutGroups:
    """The trajectories of one training step.

    Attributes:
        trained: Trajectories to train on, group after group.
        generated: All trajectories that were generated for the step, trained on or not, group after group.
        num_generations: Number of trajectories of a group.
        num_filled: Number of trained groups that are uninformative and that dynamic sampling could not replace.
        is_on_policy: Whether the weights that are trained have sampled every token.
        metrics: Further metrics of the source.
    """

    trained: list[Trajectory]
    generated: list[Trajectory]
    num_generations: int
    num_filled: int
    is_on_policy: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_batches(self) -> float:
        """Number of generated trajectories divided by the number of trained trajectories. 1 if none is trained."""
        return len(self.generated) / len(self.trained) if self.trained else 1.0


@dataclass(frozen=True)
class SourceState:
    """State of a source for a checkpoint.

    Attributes:
        batches_taken: Number of rounds of prompts (the prompts of one step) that were taken from the data.
        write: Writes the rest of the state into the checkpoint's folder. If called later, it still writes this state.
    """

    batches_taken: int
    write: Callable[[Path], None] = lambda folder: None


class RolloutSource(Protocol):
    """Source of the groups of each step. It hides from a training loop how and when the groups are made."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of one pass over the prompts."""
        ...

    @property
    def is_used_up(self) -> bool:
        """Whether no prompts are left."""
        ...

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        """Return the groups of the next step. Requires that the source is not used up.

        Args:
            step: Number of completed steps.
            clock: Measures the phases of the step.
        """
        ...

    def update_pending(self, step: int) -> None:
        """Prepare for new weights. Called after `step` steps, before an engine with a copy of the weights gets them."""
        ...

    def updated(self, step: int) -> None:
        """Resume. Called when the engine has received the weights of step `step`, and also before the first step."""
        ...

    def state(self, step: int) -> SourceState:
        """Return the state after a step, for a checkpoint."""
        ...


class PromptRounds(Protocol):
    """The prompts of each round of generation, such as `data.prompts.PromptLoader`."""

    def __len__(self) -> int:
        """Return the number of rounds of one epoch."""
        ...

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """Return the rounds of one epoch. Epochs count from 0."""
        ...

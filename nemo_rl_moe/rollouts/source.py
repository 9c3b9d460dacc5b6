# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout sources: they supply the groups of trajectories of each training step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from jaxtyping import Bool
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.failed_responses import FailureRule
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.worker import RolloutWorker

# The first number of a seed key: training and validation never share their random numbers.
TRAINING_SEEDS, VALIDATION_SEEDS = 0, 1


@dataclass(frozen=True)
class RolloutGroups:
    """The trajectories of one training step.

    Attributes:
        trained: Those that are trained on, group after group.
        generated: All of them, group after group.
        num_generations: Trajectories of a group.
        num_rounds: How often trajectories were generated.
        num_filled: Zero-variance groups among the trained ones, which only fill up the batch.
        is_on_policy: The weights that are trained have sampled every token.
        metrics: Further metrics of the source.
    """

    trained: list[Trajectory]
    generated: list[Trajectory]
    num_generations: int
    num_rounds: int
    num_filled: int
    is_on_policy: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceState:
    """State of a source for a checkpoint, opaque to all others.

    Attributes:
        batches_taken: Rounds of prompts that were taken.
        write: Writes the rest of it into the checkpoint's folder, now or later.
    """

    batches_taken: int
    write: Callable[[Path], None] = lambda folder: None


class RolloutSource(Protocol):
    """The groups of one step after the other. A loop knows nothing else of how and when they are made."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the prompts, where each takes one round of them."""
        ...

    @property
    def is_used_up(self) -> bool:
        """True when no prompts are left."""
        ...

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        """Return the groups of the next step; only while it is not used up.

        Args:
            step: Steps done.
            clock: Times the phases.
        """
        ...

    def update_pending(self, step: int) -> None:
        """Prepare for the weights of so many steps, before an engine with a copy gets them."""
        ...

    def updated(self, step: int) -> None:
        """Go on with the weights of so many steps, which the engine has; also before the first step."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Let the engine answer others inside, such as a validation."""
        ...

    def state(self, step: int) -> SourceState:
        """Return where it stands after so many steps, for a checkpoint."""
        ...

    def load_state(self, batches_taken: int) -> None:
        """Go on from where another one stood; before the first step."""
        ...


class PromptRounds(Protocol):
    """The prompts of each round of generation; `data.prompts.PromptLoader` is one."""

    def __len__(self) -> int:
        """Return the number of rounds of one epoch."""
        ...

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """Return the rounds of one epoch, counted from 0."""
        ...


class SynchronousSource:
    """A `RolloutSource` that generates when it is asked, with the weights as they are then.

    Args:
        config: The `grpo` section.
        worker: Makes trajectories.
        rounds: The prompts of each epoch, at least one round.
        sampling: How tokens are sampled.
        failures: Treatment of responses that the environment failed to score.
        informative: Says which groups, of trajectories group after group, are worth training on; dynamic sampling
            replaces the others.
    """

    def __init__(
        self,
        config: GRPOConfig,
        worker: RolloutWorker,
        rounds: PromptRounds,
        sampling: SamplingParameters,
        failures: FailureRule,
        informative: Callable[[Sequence[Trajectory]], Bool[Tensor, " groups"]],
    ):
        self._failures, self._informative = failures, informative
        self._config, self._worker, self._rounds, self._sampling = config, worker, rounds, sampling
        self._taken = 0
        self._start()

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the prompts, where each takes one round of them."""
        return len(self._rounds)

    @property
    def is_used_up(self) -> bool:
        """True when no prompts are left."""
        return self._next_round is None

    def state(self, step: int) -> SourceState:
        """Return the rounds of prompts that have been taken, of all epochs."""
        return SourceState(self._taken)

    def load_state(self, batches_taken: int) -> None:
        """Go on behind the rounds that have been taken."""
        self._taken = batches_taken
        self._start()

    def update_pending(self, step: int) -> None:
        """Do nothing: nothing is generated between two steps."""

    def updated(self, step: int) -> None:
        """Do nothing."""

    def paused(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        """Generate until there are enough groups for a step, and let the engine sleep.

        Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476, section 3.2) replaces zero-variance groups by those of
        further prompts. After `dynamic_sampling_max_gen_batches` rounds, or when no prompts are left, they fill up the
        step: a run goes on where all prompts are too easy or too hard, and `dynamic_sampling/num_filled_groups` counts
        them.
        Groups without a response to train on, for want of scores, come last.
        """
        config = self._config
        num_generations = config.num_generations_per_prompt
        generated: list[Trajectory] = []
        informative: list[list[Trajectory]] = []
        zero_variance: list[list[Trajectory]] = []
        left_out: list[list[Trajectory]] = []
        max_rounds = config.dynamic_sampling_max_gen_batches if config.use_dynamic_sampling else 1
        rounds = 0
        while rounds < max_rounds and len(informative) < config.num_prompts_per_step and not self.is_used_up:
            seed_key = (config.seed, TRAINING_SEEDS, step, rounds)
            trajectories = self._worker.run(self._take(), num_generations, self._sampling, seed_key, clock)
            generated += trajectories
            rounds += 1
            takes_part = self._failures.taking_part(trajectories, num_generations).any(dim=1).tolist()
            for index, differ in enumerate(self._informative(trajectories).tolist()):
                group = trajectories[index * num_generations : (index + 1) * num_generations]
                # Without dynamic sampling every group is taken as it comes.
                if differ or not config.use_dynamic_sampling:
                    informative.append(group)
                else:
                    (zero_variance if takes_part[index] else left_out).append(group)
        self._worker.engine.sleep()  # the trainer takes over, and new weights come behind it
        groups = [*informative, *zero_variance, *left_out][: config.num_prompts_per_step]
        return RolloutGroups(
            trained=[trajectory for group in groups for trajectory in group],
            generated=generated,
            num_generations=num_generations,
            num_rounds=rounds,
            num_filled=max(0, config.num_prompts_per_step - len(informative)),
        )

    def _start(self) -> None:
        first_epoch, first_round = divmod(self._taken, len(self._rounds))
        epochs = range(first_epoch, self._config.max_num_epochs)
        rounds = (prompts for epoch in epochs for prompts in self._rounds.epoch(epoch))
        self._stream = islice(rounds, first_round, None)
        # One round ahead, so that a loop knows its last step when it comes.
        self._next_round = next(self._stream, None)

    def _take(self) -> list[Prompt]:
        assert self._next_round is not None
        taken, self._next_round = self._next_round, next(self._stream, None)
        self._taken += 1
        return taken

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The asynchronous source: groups are generated ahead of training, in an event loop of their own."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.stored_rows import Fetch
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.asynchronous.accounts import TrajectoryBatch, batch_metrics
from nemo_rl_moe.rollouts.asynchronous.activity import (
    EngineActivity,
    RecentSteps,
    TrainerActivity,
    idle_shares,
)
from nemo_rl_moe.rollouts.asynchronous.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.asynchronous.groups import Cancellation
from nemo_rl_moe.rollouts.asynchronous.loops import RunCoroutine, in_loop
from nemo_rl_moe.rollouts.asynchronous.prompts import PromptFeed, QueueState
from nemo_rl_moe.rollouts.asynchronous.saved_queue import write_queue
from nemo_rl_moe.rollouts.limits import RolloutsGivenUpError
from nemo_rl_moe.rollouts.source import PromptRounds, RolloutGroups, SourceState
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.time_line import StepActivity, TimeLine


def prompts_of_epochs(rounds: PromptRounds, num_epochs: int) -> Iterator[Prompt]:
    """Yield the prompts of all epochs, in the order of the synchronous source."""
    return (prompt for epoch in range(num_epochs) for prompts in rounds.epoch(epoch) for prompt in prompts)


def feed_of_epochs(rounds: PromptRounds, num_epochs: int, groups_per_step: int) -> PromptFeed[Prompt]:
    """Return the feed of the prompts of all epochs, in the order of the synchronous source."""
    return PromptFeed(prompts_of_epochs(rounds, num_epochs), num_epochs * len(rounds) * groups_per_step)


async def _no_pause() -> None:
    """Pause nothing."""


class AsynchronousSource:
    """Groups of each step that were generated ahead of it, as far as a policy of staleness allows.

    The first groups are dispatched by the first `updated`, when the engine has weights.

    Args:
        dispatcher: Generates the groups.
        run: Runs coroutines in the loop of the rollouts.
        steps_per_epoch: Steps of one pass over the prompts.
        num_generations: Trajectories of a group.
        pause: Has the engine come to rest.
        rest: Has the engine come to rest for a validation, with nothing held that this needs; None: `pause` does.
        resume: Lets it generate again.
        runs_when_asked: The loop runs in calls of this source alone: new groups begin when those of a step are asked
            for.
        observe: Called with each batch; returns metrics.
        fetch: Fetches routed experts by their handles, for checkpoints.
        engines: What the engines do; None: nobody says.
        record: Gets the time line of each step.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Prompt, list[Trajectory]],
        run: RunCoroutine,
        steps_per_epoch: int,
        num_generations: int,
        *,
        pause: Callable[[], Awaitable[None]] = _no_pause,
        rest: Callable[[], Awaitable[None]] | None = None,
        resume: Callable[[], object] = lambda: None,
        runs_when_asked: bool = False,
        observe: Callable[[TrajectoryBatch], Mapping[str, float]] = lambda batch: {},
        fetch: Fetch = list,
        engines: EngineActivity | None = None,
        record: Callable[[TimeLine], object] = lambda time_line: None,
    ):
        self._dispatcher, self._run, self._observe = dispatcher, run, observe
        self._pause, self._rest, self._resume, self._fetch = pause, rest or pause, resume, fetch
        self._steps_per_epoch, self._num_generations = steps_per_epoch, num_generations
        self._runs_when_asked, self._arrived_version = runs_when_asked, 0
        self._pause_s = 0.0
        self._engines, self._record = engines or EngineActivity(), record
        self._trainer, self._recent_steps, self._has_begun = TrainerActivity(self._engines.clock), RecentSteps(), False
        self._is_observed = engines is not None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the prompts."""
        return self._steps_per_epoch

    @property
    def is_used_up(self) -> bool:
        """True when too few prompts are left for a step."""
        # In the loop's thread: between two of its steps each group is counted once.
        return self._run(in_loop(lambda: self._dispatcher.is_used_up))

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        """Return the groups of the next step; only while it is not used up.

        Args:
            step: Steps done.
            clock: Gets the phase `generation`: the time in which training waits.

        Raises:
            RolloutsGivenUpError: The source was stopped, or its last prompts were given up.
        """
        self._trainer.wait()
        with clock.phase("generation"):
            if self._runs_when_asked:
                self._run(in_loop(self._go_on))
            batch = self._run(self._dispatcher.next_batch(self._version(step)))
        if batch is None:
            raise RolloutsGivenUpError("rollouts were stopped, or their last prompts failed")
        metrics = batch_metrics(batch) | {"rollouts/pause_s": self._pause_s} | dict(self._observe(batch))
        metrics |= self._end_of_waiting()
        trained = list(chain.from_iterable(found.group for found in batch.groups))
        return RolloutGroups(
            trained,
            trained,
            self._num_generations,
            num_rounds=1,
            num_filled=0,
            is_on_policy=batch.is_on_policy,
            metrics=metrics,
        )

    def update_pending(self, step: int) -> None:
        """Prepare for the weights of so many steps: the engine comes to rest."""
        began_s = time.perf_counter()
        self._trainer.update()
        self._run(self._prepare(self._version(step)))
        self._pause_s = time.perf_counter() - began_s

    def updated(self, step: int) -> None:
        """Go on with the weights of so many steps, which the engine has."""
        self._arrived_version = self._version(step)
        if not self._has_begun:
            self._take_activity()  # what is before the first weights belongs to no step
            self._has_begun = True
        if not self._runs_when_asked:
            self._run(in_loop(self._go_on))
        self._trainer.train()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the engine answer others inside: groups that run wait.

        Raises:
            RolloutsGivenUpError: The run was asked to stop, and no trajectory goes on.
        """
        self._trainer.validate()
        self._run(_awaited(self._rest))
        self._run(in_loop(self._engines.validation_began))
        try:
            yield
        finally:
            self._run(in_loop(self._engines.validation_ended))
            self._run(in_loop(self._resume))
            self._trainer.train()

    def stop(self) -> tuple[Cancellation, ...]:
        """Cancel all groups, and return the cancellations that no batch had."""
        return self._run(self._dispatcher.stop())

    def state(self, step: int) -> SourceState:
        """Return what a checkpoint keeps after so many steps: the rounds that were trained on, and the queue."""
        queue = self.queue_state(step)
        consumed = self._run(in_loop(lambda: self._dispatcher.admission.consumed))
        batches_taken = consumed // self._dispatcher.bounds.groups_per_step
        return SourceState(batches_taken, lambda folder: write_queue(folder, queue, self._fetch))

    def load_state(self, batches_taken: int) -> None:
        """Do nothing: the dispatcher begins where the run goes on."""

    def queue_state(self, step: int) -> QueueState[Prompt, list[Trajectory]]:
        """Return the prompts and the finished groups after so many steps."""
        return self._run(in_loop(lambda: self._dispatcher.state(self._version(step))))

    def _version(self, step: int) -> int:
        """Return the optimizer steps of so many steps, skipped ones included: admission counts groups by them."""
        return step * self._dispatcher.bounds.updates_per_step

    def _end_of_waiting(self) -> dict[str, float]:
        """Return the metrics of who waited since the step before, and record its time line."""
        self._trainer.train()
        found = self._take_activity()
        if not self._is_observed:
            return {}
        self._record(self._recent_steps.add(found))
        return idle_shares(found)

    def _take_activity(self) -> StepActivity:
        return StepActivity(self._trainer.take(), self._run(in_loop(self._engines.take)))

    async def _prepare(self, version: int) -> None:
        await self._dispatcher.update_pending(version)
        await self._pause()

    def _go_on(self) -> None:
        self._resume()
        self._dispatcher.updated(self._arrived_version)


async def _awaited(function: Callable[[], Awaitable[None]]) -> None:
    await function()

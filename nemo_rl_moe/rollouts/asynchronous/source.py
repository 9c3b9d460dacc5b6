# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The asynchronous source: groups are generated ahead of training, in an event loop of their own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.asynchronous.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.asynchronous.groups import Batch, Cancellation, Ticket
from nemo_rl_moe.rollouts.asynchronous.prompts import PromptFeed, QueueState
from nemo_rl_moe.rollouts.limits import RolloutsGivenUpError
from nemo_rl_moe.rollouts.source import TRAINING_SEEDS, PromptRounds, RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory

Result = TypeVar("Result")


class RunCoroutine(Protocol):
    """Runs coroutines in the event loop of the rollouts; `LoopThread.run` is one."""

    def __call__(self, coroutine: Coroutine[Any, Any, Result], /) -> Result:
        """Run a coroutine to its end, and return its result."""
        ...


class LoopThread:
    """An event loop in a thread of its own, which goes on while the main thread trains."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the loop and its thread; its source is stopped before."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def group_seeds(ticket: Ticket[Prompt], seed: int, groups_per_step: int, num_generations: int) -> list[int]:
    """Return the seeds of a group's trajectories: those of the synchronous source, where no group was cancelled.

    They do not depend on time: a group that is generated again, by a run that goes on, has the same seeds.

    Args:
        ticket: Its ticket.
        seed: As `grpo.seed`.
        groups_per_step: Groups of a training step.
        num_generations: Trajectories of a group.
    """
    step, number = divmod(ticket.position, groups_per_step)
    key = [seed, TRAINING_SEEDS, step, ticket.attempt]
    seeds = np.random.SeedSequence(key).generate_state(groups_per_step * num_generations, np.uint64)
    return [int(each) for each in seeds[number * num_generations :][:num_generations]]


def feed_of_epochs(rounds: PromptRounds, num_epochs: int, groups_per_step: int) -> PromptFeed[Prompt]:
    """Return the feed of the prompts of all epochs, in the order of the synchronous source."""
    prompts = (prompt for epoch in range(num_epochs) for prompts in rounds.epoch(epoch) for prompt in prompts)
    return PromptFeed(prompts, num_epochs * len(rounds) * groups_per_step)


class AsynchronousSource:
    """Groups of each step that were generated ahead of it, as far as a policy of staleness allows.

    The loop calls `update_pending` before it brings new weights to the engine, and `updated` behind.

    Args:
        dispatcher: Generates the groups; it begins at once.
        run: Runs coroutines in the loop of the rollouts.
        steps_per_epoch: Steps of one pass over the prompts.
        num_generations: Trajectories of a group.
        observe: Called with each batch, such as to record its schedule.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Prompt, list[Trajectory]],
        run: RunCoroutine,
        steps_per_epoch: int,
        num_generations: int,
        observe: Callable[[Batch[Prompt, list[Trajectory]]], None] = lambda batch: None,
    ):
        self._dispatcher, self._run, self._observe = dispatcher, run, observe
        self._steps_per_epoch, self._num_generations = steps_per_epoch, num_generations
        self._run(_in_loop(dispatcher.start))

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the prompts."""
        return self._steps_per_epoch

    @property
    def is_used_up(self) -> bool:
        """True when too few prompts are left for a step."""
        # In the loop's thread: between two of its steps each group is counted once.
        return self._run(_in_loop(lambda: self._dispatcher.is_used_up))

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        """Return the groups of the next step; only while it is not used up.

        Args:
            step: Steps done.
            clock: Gets the phase `generation`: the time in which training waits.

        Raises:
            RolloutsGivenUpError: The source was stopped, or its last prompts were given up.
        """
        version = step * self._dispatcher.bounds.updates_per_step
        with clock.phase("generation"):
            batch = self._run(self._dispatcher.next_batch(version))
        if batch is None:
            raise RolloutsGivenUpError("rollouts were stopped, or their last prompts failed")
        self._observe(batch)
        trained = list(chain.from_iterable(found.group for found in batch.groups))
        return RolloutGroups(trained, trained, self._num_generations, num_rounds=1, num_filled=0)

    def update_pending(self, version: int) -> None:
        """Prepare for new weights, before the engine pauses."""
        self._run(self._dispatcher.update_pending(version))

    def updated(self, version: int) -> None:
        """Go on with new weights, which the engine has."""
        self._run(_in_loop(lambda: self._dispatcher.updated(version)))

    def stop(self) -> tuple[Cancellation, ...]:
        """Cancel all groups, and return the cancellations that no batch had."""
        return self._run(self._dispatcher.stop())

    def state(self, version: int) -> QueueState[Prompt, list[Trajectory]]:
        """Return what a checkpoint keeps between two steps.

        Args:
            version: Optimizer steps of the weights that the checkpoint has.
        """
        return self._run(_in_loop(lambda: self._dispatcher.state(version)))


async def _in_loop(function: Callable[[], Result]) -> Result:
    """Call a function in the thread of the loop that runs this."""
    return function()

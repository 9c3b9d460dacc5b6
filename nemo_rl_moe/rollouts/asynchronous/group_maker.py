# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups of trajectories for the dispatcher: a rollout worker's, made one group at a time in one event loop."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from itertools import chain, islice

import numpy as np

from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.generation.interface import GeneratedSequence, SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.asynchronous.activity import EngineActivity
from nemo_rl_moe.rollouts.asynchronous.gate import EngineGate
from nemo_rl_moe.rollouts.asynchronous.groups import Ticket
from nemo_rl_moe.rollouts.limits import RolloutWatch
from nemo_rl_moe.rollouts.pool import PooledTrajectory, TrajectoryPool
from nemo_rl_moe.rollouts.scoring import ScoringQueue
from nemo_rl_moe.rollouts.source import TRAINING_SEEDS
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime
from nemo_rl_moe.rollouts.worker import RolloutWorker


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


def _with_rewards(
    add_rewards: Callable[[Sequence[Trajectory]], list[Trajectory]], groups: Sequence[list[Trajectory]]
) -> list[list[Trajectory]]:
    """Add rewards to several groups at once."""
    found = iter(add_rewards(list(chain.from_iterable(groups))))
    return [list(islice(found, len(group))) for group in groups]


class GroupMaker:
    """Makes the groups of tickets; all methods are called in one event loop, in its thread.

    Args:
        worker: Has engine, reward function, environment and limits.
        sampling: How tokens are sampled.
        seed: As `grpo.seed`.
        groups_per_step: Groups of a training step.
        num_generations: Trajectories of a group.
        activity: Notes what the engine does; None: a new one.

    Attributes:
        num_tokens: Tokens sampled for each group, by position and attempt, restarts included.
        activity: What the engines do.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        sampling: SamplingParameters,
        *,
        seed: int,
        groups_per_step: int,
        num_generations: int,
        activity: EngineActivity | None = None,
    ):
        self._worker, self._sampling = worker, sampling
        self._seed, self._groups_per_step, self._num_generations = seed, groups_per_step, num_generations
        self.activity = activity or EngineActivity()
        self._gate = EngineGate(worker.engine, self.activity)
        self._watch: RolloutWatch | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._changes: set[asyncio.Event] = set()
        add_rewards = worker.add_rewards
        # One thread and one call at a time, of all groups that have ended meanwhile.
        self._added = None if add_rewards is None else ScoringQueue(partial(_with_rewards, add_rewards))
        self.num_tokens: dict[tuple[int, int], int] = {}

    async def make_group(self, ticket: Ticket[Prompt]) -> list[Trajectory]:
        """Return the trajectories of a ticket's prompt. When it is cancelled, so are they.

        An error of the engine or of the reward function is one of the run, as it is of a synchronous one: what a user's
        environment raises is a fault of its trajectory.

        Raises:
            RolloutsGivenUpError: The run was asked to stop, and no trajectory goes on.
            DataError: An image of the prompt cannot be read any more, or has changed.
        """
        changed = asyncio.Event()
        started = self._start(self._running_pool(), ticket, changed)
        self._changes.add(changed)
        self.activity.group_began()
        try:
            while not self._have_ended(started):
                await changed.wait()
                changed.clear()
            trajectories = [each.trajectory for each in started]
            return trajectories if self._added is None else await self._added.ask(trajectories)
        finally:
            self._changes.remove(changed)
            self.activity.group_ended()
            await self._pool.leave(started)

    async def pause(self) -> None:
        """Have the engine come to rest; trajectories wait for their sequences until `resume`."""
        await self._gate.close()

    async def rest(self) -> None:
        """Have the engine come to rest for others, which may need all places that trajectories hold.

        Raises:
            RolloutsGivenUpError: The run was asked to stop, and no trajectory goes on.
        """
        if self._supervisor is not None:
            places = self._pool.held_places
            places.keep()
            if not places.are_free:
                free = asyncio.ensure_future(places.wait_until_free())
                await asyncio.wait([free, self._supervisor], return_when=asyncio.FIRST_COMPLETED)
                free.cancel()
                if self._failure is not None:
                    raise self._failure
        await self.pause()

    def resume(self) -> None:
        """Go on, with an engine that is awake."""
        self._worker.engine.wake()
        self._gate.open()
        if self._supervisor is not None:
            self._pool.held_places.lend()

    async def close(self) -> None:
        """End what looks after trajectories; all of them have been cancelled."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
        self._supervisor = self._watch = None

    def _running_pool(self) -> TrajectoryPool:
        """Return the pool, whose supervisor begins with the first group, in the loop's own thread."""
        if self._supervisor is None:
            thread = ThreadTime(self._worker.limits.clock)
            self._watch = RolloutWatch(self._worker.limits, thread).__enter__()
            self._pool = TrajectoryPool(
                self._worker, self._sampling, PhaseClock(), thread, self._watch, self._gate.generate
            )
            self._pool.enter()
            loop = asyncio.get_running_loop()
            self._supervisor = loop.create_task(self._supervise(), context=Context())
        return self._pool

    async def _supervise(self) -> None:
        try:
            await self._pool.run_until(lambda: False)
        except Exception as error:
            self._failure = error
            for changed in self._changes:
                changed.set()

    def _start(self, pool: TrajectoryPool, ticket: Ticket[Prompt], changed: asyncio.Event) -> list[PooledTrajectory]:
        prompt, size, key = ticket.prompt, self._num_generations, (ticket.position, ticket.attempt)

        def count(sequence: GeneratedSequence) -> None:
            self.num_tokens[key] = self.num_tokens.get(key, 0) + len(sequence.token_ids)

        (inputs,) = prompt_inputs([prompt])
        return [
            pool.start(
                prompt,
                f"{prompt.sample_id}#{ticket.position % self._groups_per_step}",
                f"response {number + 1} of {size}",
                seed,
                inputs,
                note_change=changed.set,
                note=count,
            )
            for number, seed in enumerate(group_seeds(ticket, self._seed, self._groups_per_step, size))
        ]

    def _have_ended(self, started: list[PooledTrajectory]) -> bool:
        """Return whether all have ended; raise the error of one, or of the engine in lockstep."""
        if self._failure is not None:
            raise self._failure
        for each in started:
            each.look_after()
        return all(each.has_ended for each in started)

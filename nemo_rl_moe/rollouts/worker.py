# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The rollout worker: runs many trajectories at the same time, and pools what they ask of the engine and the scorer."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.environments.interface import BatchScorer, Score, ScoringItem
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationEngine,
    GenerationRequest,
    SamplingParameters,
)
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.environment import Decode, Encode, Environment, Session
from nemo_rl_moe.rollouts.limits import RolloutLimits, RolloutWatch
from nemo_rl_moe.rollouts.running import RunningTrajectory, task_factory
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime, TrajectoryTimer

Request = TypeVar("Request")
Result = TypeVar("Result")

CHECK_S = 0.1
"""Seconds between two looks at the limits, while a trajectory waits for something of its own."""
CLEANUP_S = 5.0
"""Seconds that code may take for its end when it is cancelled."""


class _Pool(Generic[Request, Result]):
    """Requests of many coroutines that wait to be answered together.

    Args:
        answer: Answers many at once; yields the index and the result of each as it is ready.
    """

    def __init__(self, answer: Callable[[Sequence[Request]], Iterable[tuple[int, Result]]]):
        self._answer = answer
        self._queued: list[tuple[Request, asyncio.Future[Result]]] = []

    @property
    def is_empty(self) -> bool:
        """True when nobody waits; one that waits no longer, as its trajectory has ended, does not count."""
        return all(future.done() for _, future in self._queued)

    def submit(self, request: Request) -> "asyncio.Future[Result]":
        """Queues a request."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queued.append((request, future))
        return future

    def answers(self) -> Iterator[Result]:
        """Has all queued requests answered, and hands each answer to who waits for it, as it is ready."""
        queued = [(request, future) for request, future in self._queued if not future.done()]
        self._queued = []
        for index, result in self._answer([request for request, _ in queued]):
            if not queued[index][1].done():
                queued[index][1].set_result(result)
            yield result


@dataclass(frozen=True)
class RolloutWorker:
    """Makes trajectories: the environment drives each, the engine generates, the scorer scores.

    The driver's own thread does all of it: an engine's call is made when every trajectory waits, so that which requests
    share a batch does not depend on time, and a run can be repeated to the last bit.

    Attributes:
        engine: Generates.
        scorer: Scores responses.
        environment: Drives the trajectories.
        decode: From token ids to text.
        encode: From text to token ids.
        max_tokens: Most tokens of a trajectory.
        watch: Sees the trajectories of each call, and may end the run by an error.
        reward_weights: Of each named reward; None where a score is one number.
        limits: Limits in time.
    """

    engine: GenerationEngine
    scorer: BatchScorer
    environment: Environment
    decode: Decode
    encode: Encode
    max_tokens: int
    watch: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None
    reward_weights: Mapping[str, float] | None = None
    limits: RolloutLimits = field(default_factory=RolloutLimits)

    def run(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParameters,
        seed_key: Sequence[int],
        clock: PhaseClock,
    ) -> list[Trajectory]:
        """Trajectories of each prompt, group after group. The engine stays awake: the source of a step lets it sleep.

        Args:
            prompts: At least one.
            num_generations: Trajectories of each prompt.
            sampling: How tokens are drawn.
            seed_key: Whole numbers that name this call; the same ones give the same trajectories.
            clock: Gets the phases `generation` and `rewards`.

        Raises:
            EnvironmentFailedError: The watch ends the run.
            RolloutsGivenUpError: The run was asked to stop, and the trajectories make no progress.
            DataError: An image of a prompt cannot be read any more, or has changed.
        """
        seeds = np.random.SeedSequence(list(seed_key)).generate_state(len(prompts) * num_generations, np.uint64)
        thread = ThreadTime(self.limits.clock)
        self.engine.wake()
        with RolloutWatch(self.limits, thread) as watch:
            call = _Call(self, sampling, clock, thread, watch)
            trajectories = _run_to_the_end(call.run(prompts, num_generations, seeds.tolist()))
        self.watch(trajectories)
        return trajectories


class _Call:
    """One call of a worker: trajectories from their prompts to their ends.

    Args:
        worker: The worker.
        sampling: How tokens are drawn.
        clock: Gets the phases `generation` and `rewards`.
        thread: Time of this thread.
        watch: Keeps the limits.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        sampling: SamplingParameters,
        clock: PhaseClock,
        thread: ThreadTime,
        watch: RolloutWatch,
    ):
        self._worker, self._sampling, self._clock = worker, sampling, clock
        self._time, self._watch = thread, watch
        self._requests: _Pool[GenerationRequest, GeneratedSequence] = _Pool(worker.engine.generate)
        self._items: _Pool[ScoringItem, Score] = _Pool(lambda batch: enumerate(worker.scorer.score(batch)))
        self._changed = asyncio.Event()

    async def run(self, prompts: Sequence[Prompt], num_generations: int, seeds: Sequence[int]) -> list[Trajectory]:
        """Makes the trajectories, group after group."""
        asyncio.get_running_loop().set_task_factory(task_factory(self._time))
        # The trajectories of a group share the arrays of their images.
        prepared = zip(prompts, prompt_inputs(prompts), strict=True)
        repeated = [pair for pair in prepared for _ in range(num_generations)]
        started = [
            self._start(prompt, number, num_generations, seed, inputs)
            for number, ((prompt, inputs), seed) in enumerate(zip(repeated, seeds, strict=True))
        ]
        timers = [each.timer for each in started]
        self._watch.observe(timers, lambda: [each.timer for each in started if each.is_running])
        try:
            while await self._all_wait(started):
                self._watch.note_progress()
                if not self._requests.is_empty:
                    await self._generate()
                else:
                    with self._clock.phase("rewards"), self._time.call_for_many():
                        deque(self._items.answers(), maxlen=0)
                self._watch.note_progress()
            return [each.trajectory for each in started]
        finally:
            await _cancel_all()

    def _start(
        self, prompt: Prompt, number: int, num_generations: int, seed: int, inputs: Mapping[str, ModelInput]
    ) -> RunningTrajectory:
        worker = self._worker
        session = Session(
            prompt=prompt,
            group_id=f"{prompt.sample_id}#{number // num_generations}",
            sampling=self._sampling,
            seed=seed,
            max_tokens=worker.max_tokens,
            submit_request=lambda request: started.wait_for(self._requests.submit(request)),
            submit_item=lambda item: started.wait_for(self._items.submit(item)),
            decode=worker.decode,
            encode=worker.encode,
            reward_weights=worker.reward_weights,
            model_inputs=dict(inputs),
        )
        coroutine = worker.environment.rollout(session)
        label = f"{prompt.sample_id}, response {number % num_generations + 1} of {num_generations}"
        timer = TrajectoryTimer(label, coroutine, self._time)
        started = RunningTrajectory(session, timer, coroutine, self._note_change)
        return started

    def _note_change(self) -> None:
        self._watch.note_progress()
        self._changed.set()

    async def _generate(self) -> None:
        """Has all queued sequences continued; those that are ready go on while others are still generated."""
        answers = self._requests.answers()
        while True:
            with self._clock.phase("generation"), self._time.call_for_many():
                sequence = next(answers, None)
            if sequence is None:
                return
            self._clock.count_tokens("generation", len(sequence.token_ids))
            with self._clock.phase("rewards"):
                await asyncio.sleep(0)

    async def _all_wait(self, started: Sequence[RunningTrajectory]) -> bool:
        """Lets the trajectories run until each has ended or waits for a pool; whether any waits."""
        await asyncio.sleep(0)
        while True:
            self._watch.check_request_to_stop()
            for each in started:
                if not each.has_ended and self._watch.has_expired(each.timer):
                    each.expire(self._worker.limits.timeout_text(each.timer.ended_at or each.timer.where()))
            if not any(each.is_running for each in started):
                for each in started:
                    each.check()  # an error of one ends all
                return any(not each.has_ended for each in started)
            # An environment may wait for something of its own, such as a tool.
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._changed.wait()


def _run_to_the_end(trajectories: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in an event loop of its own; unlike `asyncio.run`, it leaves the handling of signals alone."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(trajectories)
    finally:
        loop.close()


async def _cancel_all() -> None:
    """Cancels all other tasks of the loop; what does not let itself be cancelled is left behind."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLEANUP_S)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories that run in one event loop: started, kept within their limits, and answered together in lockstep."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import Lockstep, LockstepEngine
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.ending import ended
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.limits import RolloutWatch, timeout_text
from nemo_rl_moe.rollouts.places import HeldPlaces
from nemo_rl_moe.rollouts.running import RunningTrajectory, task_factory
from nemo_rl_moe.rollouts.scoring import ScoringQueue
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime, TrajectoryTimer

if TYPE_CHECKING:
    from nemo_rl_moe.rollouts.worker import RolloutWorker

Generate = Callable[[GenerationRequest], Coroutine[Any, Any, GeneratedSequence]]
Begin = Callable[[int], RunningTrajectory]
"""Function that starts an attempt at a trajectory, counted from 0."""
CHECK_S = 0.1
"""Seconds between two looks at the limits, while a trajectory waits for something of its own."""
MANY = 4096
"""Trajectories that are looked at so often; of more, each look costs more, and there are fewer."""
CLEANUP_S = 5.0
"""Seconds that code may take for its end when it is cancelled."""


class PooledTrajectory:
    """A trajectory of the pool in one attempt, or in several where attempts fail; each is a fresh session.

    Attributes:
        attempts: All attempts so far; the last one counts.
    """

    def __init__(self, begin: Begin, num_attempts: int):
        self._begin, self._num_attempts = begin, num_attempts
        self.attempts = [begin(0)]

    def look_after(self) -> None:
        """Start the next attempt where the last one has failed and another is allowed.

        Raises:
            Exception: That of the engine, of the reward function, or of an environment that is no user's function.
        """
        self.attempts[-1].check()
        if self.attempts[-1].has_failed and len(self.attempts) < self._num_attempts:
            self.attempts.append(self._begin(len(self.attempts)))

    @property
    def has_ended(self) -> bool:
        """Return whether the trajectory is there."""
        return self.attempts[-1].has_ended

    @property
    def trajectory(self) -> Trajectory:
        """Return what has come of the last attempt; when it has ended."""
        found = self.attempts[-1].trajectory
        return replace(found, num_retries=len(self.attempts) - 1) if len(self.attempts) > 1 else found


class TrajectoryPool:
    """Trajectories of one event loop. Whoever runs them calls `enter` in the loop, `start`, and `run_until`.

    With an engine that works in lockstep, sequences and then scores are made when every trajectory waits.

    Args:
        worker: Has engine, reward function, environment and limits.
        sampling: How tokens are sampled.
        clock: Gets the phases `generation` and `rewards`.
        thread: Time of the loop's thread.
        watch: Keeps the limits.
        generate: Continues a sequence; None: the worker's engine does.

    Attributes:
        held_places: Places that trajectories hold.
    """

    def __init__(
        self,
        worker: "RolloutWorker",
        sampling: SamplingParameters,
        clock: PhaseClock,
        thread: ThreadTime,
        watch: RolloutWatch,
        generate: Generate | None = None,
    ):
        self._worker, self._sampling, self._clock = worker, sampling, clock
        self._time, self._watch = thread, watch
        self._generate = worker.engine.generate if generate is None else generate
        self._engine_in_lockstep = worker.engine if isinstance(worker.engine, LockstepEngine) else None
        score = worker.reward_function.score
        self._scores_in_lockstep: Lockstep[ScoringItem, Score] = Lockstep(lambda batch: enumerate(score(batch)))
        as_they_come, in_lockstep = ScoringQueue(score), self._engine_in_lockstep is not None
        self._ask_for_score: Callable[[ScoringItem, int], Coroutine[Any, Any, Score]] = (
            self._scores_in_lockstep.ask if in_lockstep else lambda item, place: as_they_come.ask(item)
        )
        self.held_places = HeldPlaces()
        self._places = count()
        self._changed = asyncio.Event()
        self._started: list[RunningTrajectory] = []
        self._timers: list[TrajectoryTimer] = []

    def enter(self) -> None:
        """Have the running loop count the time of each trajectory, and the watch see those that run."""
        asyncio.get_running_loop().set_task_factory(task_factory(self._time))
        self._watch.observe(self._timers, lambda: [each.timer for each in self._started if each.is_running])

    def start(
        self,
        prompt: Prompt,
        group_id: str,
        name: str,
        seed: int,
        inputs: Mapping[str, ModelInput],
        *,
        note_change: Callable[[], object] = lambda: None,
        note: Callable[[GeneratedSequence], object] = lambda sequence: None,
    ) -> PooledTrajectory:
        """Start a trajectory. Where it fails, a fresh session begins, as often as the worker allows.

        Args:
            prompt: What it begins with.
            group_id: Trajectories of one group are compared with each other.
            name: Which of its group's it is, for messages.
            seed: Of its first response in the first attempt.
            inputs: Further inputs of the model.
            note_change: Called when it ends, begins to wait or has its answer.
            note: Called with each of its sequences.
        """

        place = next(self._places)

        def begin(attempt: int) -> RunningTrajectory:
            label = f"{prompt.sample_id}, {name}" + (f", attempt {attempt + 1}" if attempt else "")
            return self._begin(prompt, group_id, label, seed_of_attempt(seed, attempt), inputs, changed, note, place)

        def changed() -> None:
            self._note_change()
            note_change()

        return PooledTrajectory(begin, self._worker.settings_of(prompt).num_attempts)

    def _begin(
        self,
        prompt: Prompt,
        group_id: str,
        label: str,
        seed: int,
        inputs: Mapping[str, ModelInput],
        changed: Callable[[], None],
        note: Callable[[GeneratedSequence], object],
        place: int,
    ) -> RunningTrajectory:
        worker = self._worker
        settings = worker.settings_of(prompt)
        started: RunningTrajectory
        session = Session(
            prompt=prompt,
            group_id=group_id,
            sampling=self._sampling,
            seed=seed,
            max_tokens=worker.max_tokens,
            submit_request=lambda request: started.wait_for(
                "generation", self._generate(replace(request, place=place)), note
            ),
            submit_item=lambda item: started.wait_for("rewards", self._ask_for_score(item, place)),
            decode=worker.decode,
            encode=worker.encode,
            reward_weights=settings.reward_weights,
            model_inputs=dict(inputs),
            continuation=settings.continuation,
            wait_aside=lambda process: started.wait_for("a process", process),
            places=self.held_places,
        )
        coroutine = ended(worker.environment.rollout(session), session)
        timer = TrajectoryTimer(label, coroutine, self._time, settings.timeout_s)
        started = RunningTrajectory(session, timer, coroutine, changed)
        self._started.append(started)
        self._timers.append(timer)
        self._watch.note_start()
        self._changed.set()
        return started

    async def leave(self, trajectories: Sequence[PooledTrajectory]) -> None:
        """Forget trajectories; those that have not ended are cancelled."""
        attempts = [attempt for each in trajectories for attempt in each.attempts]
        for each in attempts:
            self._started.remove(each)
            self._timers.remove(each.timer)
        running = [each.task for each in attempts if not each.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLEANUP_S)

    async def run_until(self, is_enough: Callable[[], bool]) -> None:
        """Keep limits and answer in lockstep, until it is enough.

        Raises:
            RolloutsGivenUpError: The run was asked to stop, and no trajectory goes on.
        """
        while True:
            await asyncio.sleep(0)
            self._keep_limits()
            if is_enough():
                return
            unfinished = [each for each in self._started if not each.has_ended]
            if self._engine_in_lockstep is None or not unfinished or any(each.is_running for each in unfinished):
                await self._wait_for_a_change(unfinished)
            elif self._engine_in_lockstep.is_waited_for:
                await self._answer(self._engine_in_lockstep, "generation")
            elif self._scores_in_lockstep.is_waited_for:
                await self._answer(self._scores_in_lockstep, "rewards")
            else:  # all wait until the engine has its new weights
                await self._wait_for_a_change(unfinished)

    def _note_change(self) -> None:
        self._watch.note_progress()
        self._changed.set()

    def _keep_limits(self) -> None:
        """End trajectories that take too long."""
        if self._engine_in_lockstep is None and any(
            each.waits_for in ("generation", "rewards") for each in self._started
        ):
            self._watch.note_progress()  # an engine or a reward function that hangs has limits of its own
        self._watch.check_request_to_stop()
        for each in self._started:
            if not each.has_ended and self._watch.has_expired(each.timer):
                each.expire(timeout_text(each.timer))

    async def _wait_for_a_change(self, unfinished: Sequence[RunningTrajectory]) -> None:
        """Wait until the limits are to be looked at again; in lockstep, at most until a trajectory goes on."""
        if self._engine_in_lockstep is not None or not unfinished:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(check_s(len(unfinished)) if unfinished else None):
                    await self._changed.wait()
            return
        waits = {each.waits_for for each in unfinished}
        phase = next((name for name in ("generation", "rewards") if name in waits), None)
        with self._clock.phase(phase) if phase is not None else nullcontext():
            await asyncio.wait([each.task for each in unfinished], timeout=check_s(len(unfinished)))

    async def _answer(self, pool: "Lockstep[Any, Any]", phase: str) -> None:
        """Answer all who wait; those whose answer is there go on while others are still answered."""
        answers = pool.answer_all()
        while True:
            with self._clock.phase(phase), self._time.call_for_many():
                if next(answers, None) is None:
                    return
            self._watch.note_progress()
            with self._clock.phase("rewards"):
                await asyncio.sleep(0)


def check_s(num_unfinished: int) -> float:
    """Return the seconds between two looks at so many trajectories, so that the loop has most of its time."""
    return CHECK_S * max(1.0, num_unfinished / MANY)


def seed_of_attempt(seed: int, attempt: int) -> int:
    """Return a trajectory's own seed for its first attempt; for later ones, numbers that no other trajectory has."""
    if attempt == 0:
        return seed
    return int(np.random.SeedSequence([seed, 0, attempt]).generate_state(1, np.uint64)[0])


async def cancel_all() -> None:
    """Cancel all other tasks of the loop; what does not let itself be cancelled is left behind."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLEANUP_S)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The supervisor of trajectories: it reports stragglers, and answers requests in lockstep."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.generation.lockstep import Lockstep
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.loops import cancelled
from nemo_rl_moe.rollouts.running import RunningTrajectory

CHECK_S = 0.1
"""Seconds between two checks."""
STOP_GRACE_S = 10.0
"""Seconds without progress after a request to stop, after which a step is given up."""
QUIET_S = 10.0
"""Seconds without progress until stragglers are reported first. Each further report waits twice as long."""
SETTLING_TURNS = 8
"""Number of event-loop iterations to wait, in which a replacement group makes its first requests."""
MANY = 4096
"""Number of trajectories above which the interval between checks grows in proportion."""
_MOST_REPORTED = 4


class RolloutsGivenUpError(Exception):
    """Rollouts made no progress after a request to stop. Their step is lost."""


@dataclass(frozen=True)
class RolloutReports:
    """Callbacks between rollouts and the user.

    Attributes:
        stop_reason: Returns the request to stop, such as "SIGTERM", if there is one.
        message: Receives a line on rollouts that take long.
        warn: Receives a line on a step that is given up.
    """

    stop_reason: Callable[[], str | None] = lambda: None
    message: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class LockstepQueues:
    """Queues that are answered when all trajectories wait, in this order.

    Attributes:
        requests: Requests to the engine.
        scores: Responses to score.
        added: Groups that get added rewards once all trajectories have ended. None without such rewards.
    """

    requests: Lockstep[Any, Any]
    scores: Lockstep[Any, Any]
    added: Lockstep[Any, Any] | None


class Supervisor:
    """Supervises the trajectories of one event loop.

    Args:
        queues: Queues of an engine in lockstep, which answers requests only when all trajectories wait. None if the
            engine answers requests as they arrive.
        note_failure: Called when the supervisor ends with an error.

    Attributes:
        clock: Adds up the time of the phases `generation`, `rewards` and `reward_model`.
        num_adding: Number of groups that wait for added rewards.
        failure: The error with which the supervisor has ended.
    """

    def __init__(self, reports: RolloutReports, queues: LockstepQueues | None, note_failure: Callable[[], None]):
        self.clock = PhaseClock()
        self.num_adding = 0
        self.failure: Exception | None = None
        self._reports, self._queues, self._note_failure = reports, queues, note_failure
        self._task: asyncio.Task[None] | None = None
        self._started: list[RunningTrajectory] = []
        self._changed = asyncio.Event()
        self._num_changes = 0
        self._is_idle = True
        self._progress_at, self._next_notice_s = 0.0, QUIET_S
        self._stop_seen_at: float | None = None

    def begin(self) -> None:
        """Begin to supervise, in the running event loop. A second call has no effect."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def end(self) -> None:
        """End the supervision. Requires that all trajectories have been cancelled."""
        await cancelled([self._task])

    def add(self, trajectory: RunningTrajectory) -> None:
        """Supervise a trajectory that has started."""
        self._started.append(trajectory)
        self._next_notice_s = QUIET_S
        self._is_idle = False
        self.note_change()

    def remove(self, trajectory: RunningTrajectory) -> None:
        self._started.remove(trajectory)

    def note_change(self) -> None:
        """Note that a trajectory begins, ends, begins to wait or gets an answer."""
        self._note_progress()
        self._num_changes += 1
        self._changed.set()

    async def settled(self) -> None:
        """Wait until no trajectory runs, and all phases of the clock have ended."""
        while not self._is_idle and self.failure is None:
            await asyncio.sleep(0)

    def _note_progress(self) -> None:
        self._progress_at = asyncio.get_running_loop().time()

    async def _supervise(self) -> None:
        try:
            while True:
                await asyncio.sleep(0)
                unfinished = [each for each in self._started if not each.has_ended]
                self._look_at_progress([each for each in unfinished if each.is_running])
                await self._answer_or_wait(unfinished)
        except Exception as error:
            self.failure = error
            self._note_failure()

    def _look_at_progress(self, running: Sequence[RunningTrajectory]) -> None:
        """Report stragglers, and give up after a request to stop."""
        if self._queues is None and any(each.waits_for in ("generation", "rewards") for each in self._started):
            self._note_progress()  # engines and reward functions have other limits
        now = asyncio.get_running_loop().time()
        reason = self._reports.stop_reason()
        if reason is not None:
            self._stop_seen_at = now if self._stop_seen_at is None else self._stop_seen_at
            if now - max(self._stop_seen_at, self._progress_at) > STOP_GRACE_S:
                text = (
                    f"{reason}: rollouts are given up, as no trajectory has made progress for {STOP_GRACE_S:g} s;"
                    f" waited for {_described(running)}"
                )
                self._reports.warn(text)
                raise RolloutsGivenUpError(text)
        if running and now - self._progress_at >= self._next_notice_s:
            self._next_notice_s *= 2
            self._reports.message(
                f"rollouts: no progress for {now - self._progress_at:.0f} s; {len(self._started) - len(running)} of"
                f" {len(self._started)} trajectories have ended or wait for running ones; running:"
                f" {_described(running)}"
            )

    async def _answer_or_wait(self, unfinished: Sequence[RunningTrajectory]) -> None:
        """Answer requests if the engine is in lockstep and every trajectory waits. Otherwise wait."""
        queues = self._queues
        if queues is None or any(each.is_running for each in unfinished):
            await self._wait_for_a_change(unfinished)
        elif not await self._is_settled():
            return
        elif queues.requests.is_waited_for:
            await self._answer(queues.requests, "generation")
        elif queues.scores.is_waited_for:
            await self._answer(queues.scores, "rewards")
        elif queues.added is not None and queues.added.is_waited_for and not unfinished:
            await self._answer(queues.added, "reward_model")
        else:  # no trajectory runs, or all wait until the engine has its new weights
            await self._wait_for_a_change(unfinished)

    async def _is_settled(self) -> bool:
        """Return whether no trajectory begins, ends or makes a request during some loop iterations."""
        # Thus retried trajectories and replacement groups join the batch of the others.
        before = self._num_changes
        for _ in range(SETTLING_TURNS):
            await asyncio.sleep(0)
        return self._num_changes == before

    async def _wait_for_a_change(self, unfinished: Sequence[RunningTrajectory]) -> None:
        """Wait until the next check. With an engine in lockstep, return earlier if a trajectory resumes."""
        waits = {"reward_model"} if self.num_adding else {each.waits_for for each in unfinished}
        phase = next((name for name in ("generation", "rewards", "reward_model") if name in waits), None)
        self._is_idle = not unfinished and not self.num_adding
        self._changed.clear()
        with self.clock.phase(phase) if phase and self._queues is None else nullcontext():
            if self._queues is None and unfinished:
                await asyncio.wait([each.task for each in unfinished], timeout=check_s(len(unfinished)))
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(check_s(len(unfinished)) if unfinished else None):
                    await self._changed.wait()

    async def _answer(self, queue: Lockstep[Any, Any], phase: str) -> None:
        """Answer all requests of a queue. A trajectory resumes as soon as its result is set."""
        answers = queue.answer_all()
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            with self.clock.phase(phase):
                if next(answers, None) is None:
                    return
            if (took_s := loop.time() - began_s) > CHECK_S:
                for each in self._started:
                    if each.is_running:
                        each.leave_out(took_s)
            self._note_progress()
            with self.clock.phase("rewards"):
                await asyncio.sleep(0)


def check_s(num_unfinished: int) -> float:
    """Return the seconds between two checks, so that checks of many trajectories leave time for their code."""
    return CHECK_S * max(1.0, num_unfinished / MANY)


def _described(running: Sequence[RunningTrajectory]) -> str:
    longest_first = sorted(running, key=lambda each: each.seconds, reverse=True)
    shown = [f"{each.label} ({each.time_of_limit}, at {each.where()})" for each in longest_first[:_MOST_REPORTED]]
    more = [f"{len(running) - _MOST_REPORTED} more"] if len(running) > _MOST_REPORTED else []
    return ", ".join([*shown, *more])

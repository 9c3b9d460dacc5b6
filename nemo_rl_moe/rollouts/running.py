# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Running trajectories: their tasks, their waiting, and their time limit."""

import asyncio
import inspect
import sysconfig
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.trajectory import Trajectory

if TYPE_CHECKING:
    from nemo_rl_moe.rollouts.environment import Session

TIMEOUT_KEY = "env.rollout_timeout_s"
Result = TypeVar("Result")
RunningCode = Coroutine[Any, Any, Trajectory]
WaitsFor = Literal["generation", "rewards", "a process"]
_NOT_A_USERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))


class Answers(Protocol):
    """Interface that answers requests of trajectories: the runner or, in another process, the connection to it."""

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Return the continuation of one sequence of a trajectory."""
        ...

    async def score(self, item: ScoringItem, place: int) -> Score:
        """Return the score of one response of the trajectory with the index `place`."""
        ...


class RunningTrajectory:
    """One attempt at a trajectory, from its start to its end.

    Args:
        answers: Runner that answers its requests, or a connection to the runner.
        place: Index by which requests are sorted if the engine answers all of them together, in lockstep.
        note_change: Called when it ends, begins to wait or gets an answer.
        note_sequence: Called with each of its sequences.

    Attributes:
        task: Runs its code. Set by `start`.
        seen_at: Line at which its code was last seen, if the code runs in another process. None otherwise.
    """

    task: "asyncio.Task[Trajectory]"

    def __init__(
        self,
        answers: Answers,
        place: int,
        note_change: Callable[[], None],
        note_sequence: Callable[[GeneratedSequence], object] = lambda sequence: None,
    ):
        self._answers, self._place = answers, place
        self._note_change, self._note_sequence = note_change, note_sequence
        self.seen_at: str | None = None
        self.label = ""
        self._waits: list[tuple[WaitsFor, asyncio.Task[Any] | None]] = []
        self._failed: Trajectory | None = None
        self._error: BaseException | None = None
        self._timeout_s: float | None = None
        self._own_s, self._since = 0.0, 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def start(
        self,
        session: "Session",
        label: str,
        coroutine: RunningCode,
        timeout_s: float | None = None,
        steps: Callable[[RunningCode], RunningCode] = lambda coroutine: coroutine,
    ) -> None:
        """Start the trajectory's code, which requests sequences and scores through the session.

        Args:
            label: Name in messages.
            timeout_s: Maximum seconds, not counting waits for answers. None for no limit.
            steps: Wraps the coroutine, to observe its steps.
        """
        self._session, self.label, self._coroutine, self._timeout_s = session, label, coroutine, timeout_s
        self.task = asyncio.get_running_loop().create_task(steps(coroutine))
        self.task.add_done_callback(self._end)
        self._start_time()

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        found = await self._wait_for("generation", self._answers.generate(replace(request, place=self._place)))
        self._note_sequence(found)
        return found

    async def score(self, item: ScoringItem) -> Score:
        return await self._wait_for("rewards", self._answers.score(item, self._place))

    async def wait_aside(self, process: Coroutine[Any, Any, Result]) -> Result:
        """Wait for a limited resource, such as a free process, and return it.

        An engine in lockstep answers only when all trajectories wait. This wait counts, so that the engine can answer
        the other trajectories meanwhile.
        """
        return await self._wait_for("a process", process)

    async def _wait_for(self, what: WaitsFor, answer: Coroutine[Any, Any, Result]) -> Result:
        """Wait for an answer and return it. An error of the answer ends the run."""
        if not self.has_ended and not self._waits:
            self._stop_time()
        if self.has_ended:  # an abandoned task
            answer.close()
            raise asyncio.CancelledError
        wait = what, asyncio.current_task()
        self._waits.append(wait)
        self._note_change()
        try:
            return await answer
        except Exception as error:
            self._error = error
            raise
        finally:
            self._waits.remove(wait)
            if not self._waits:
                self._start_time()
            self._note_change()

    @property
    def waits_for(self) -> WaitsFor | None:
        """The source of an answer for which it waits. None while its code runs or awaits anything else.

        Of an agent that waits for one of several answers, it is not known whether its code runs, so it counts as
        waiting.
        """
        return self._waits[0][0] if self._waits else None

    @property
    def has_ended(self) -> bool:
        return self._failed is not None or self.task.done()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with a fault of its environment. Requires that `check` was called before."""
        return self.has_ended and self.trajectory.fault is not None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended and does not wait for the engine, the reward function or a free process."""
        return not self.has_ended and self.waits_for is None

    @property
    def seconds(self) -> float:
        """Seconds in which its code ran or awaited anything but an answer."""
        is_counted = self.waits_for is None and not self.has_ended
        return self._own_s + (asyncio.get_running_loop().time() - self._since if is_counted else 0.0)

    @property
    def time_of_limit(self) -> str:
        """Its seconds and their limit, for messages."""
        limit = "" if self._timeout_s is None else f" of {self._timeout_s:g}"
        return f"{self.seconds:.0f}{limit} s"

    def where(self) -> str:
        """Return the line of its code at which it waits, such as `tools.py:41 in look_up`."""
        return self.seen_at or where_in(self._coroutine)

    def check(self) -> None:
        """Raise an error that ends the run, such as one of the engine or of the reward function."""
        if self._error is not None:
            raise self._error
        if self._failed is None and self.task.done():
            self.task.result()

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory, once it has ended."""
        return self._failed if self._failed is not None else self.task.result()

    def leave_out(self, seconds: float) -> None:
        """Deduct `seconds` from its running time, because the engine computed in the same thread meanwhile."""
        self._own_s -= seconds
        self._stop_time()
        self._start_time()

    def _start_time(self) -> None:
        self._since = asyncio.get_running_loop().time()
        if self._timeout_s is not None and not self.has_ended:
            left_s = self._timeout_s - self._own_s
            self._stop_alarm()
            self._alarm = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire)

    def _stop_time(self) -> None:
        self._own_s += asyncio.get_running_loop().time() - self._since
        self._stop_alarm()
        if self._timeout_s is not None and self._own_s > self._timeout_s:  # in code that does not await
            self._expire()

    def _expire(self) -> None:
        """End the trajectory as it is now, as it took too long. Cancel its code without waiting for its end."""
        if self.has_ended:
            return
        reason = f"took longer than {TIMEOUT_KEY}={self._timeout_s:g} (at {self.where()})"
        self._failed = self._session.failed(Fault.TIMEOUT, reason, truncated_by="time")
        self.task.cancel()
        self._end(self.task)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _end(self, task: "asyncio.Task[Trajectory]") -> None:
        self._stop_alarm()
        for _, asking in self._waits:
            if asking is not None and asking is not task:  # an abandoned task
                asking.cancel()
        if task.done() and not task.cancelled():
            task.exception()  # otherwise asyncio reports it as never retrieved
        self._note_change()


class RetriedTrajectory:
    """A trajectory in one attempt, or in several if attempts fail.

    Args:
        begin: Starts an attempt, counted from 0.
        num_attempts: Maximum number of attempts.

    Attributes:
        attempts: All attempts so far, of which the last one counts.
    """

    def __init__(self, begin: Callable[[int], RunningTrajectory], num_attempts: int):
        self._begin, self._num_attempts = begin, num_attempts
        self.attempts = [begin(0)]

    def look_after(self) -> None:
        """Start the next attempt if the last one has failed and another is allowed.

        Raises:
            Exception: An error of the engine, of the reward function, or of an environment that is not a user's
                function.
        """
        last = self.attempts[-1]
        last.check()
        if last.has_failed and len(self.attempts) < self._num_attempts:
            self.attempts.append(self._begin(len(self.attempts)))

    @property
    def has_ended(self) -> bool:
        return self.attempts[-1].has_ended

    @property
    def trajectory(self) -> Trajectory:
        """The result of the last attempt, once it has ended."""
        found = self.attempts[-1].trajectory
        return replace(found, num_retries=len(self.attempts) - 1) if len(self.attempts) > 1 else found


def seed_of_attempt(seed: int, attempt: int) -> int:
    """Return the seed of one attempt: `seed` for the first, and for each later one a seed of no other trajectory."""
    if attempt == 0:
        return seed
    return int(np.random.SeedSequence([seed, 0, attempt]).generate_state(1, np.uint64)[0])


def where_in(coroutine: object) -> str:
    """Return the innermost line of a user's code at which a coroutine waits."""
    frames: list[FrameType] = []
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
        frames.append(coroutine.cr_frame)
        coroutine = coroutine.cr_await
    return innermost((each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in reversed(frames))


def innermost(frames: Iterable[tuple[str, int | str, str]]) -> str:
    """Return file, line and function of the first frame outside of Python, this package and installed packages.

    Args:
        frames: File, line and function of each frame, from the innermost on.
    """
    all_frames = list(frames)
    own = [each for each in all_frames if not each[0].startswith(_NOT_A_USERS) and "site-packages" not in each[0]]
    if not all_frames:
        return "its end"
    filename, line, function = (own or all_frames)[0]
    return f"{Path(filename).name}:{line} in {function}"

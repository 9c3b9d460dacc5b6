# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Time that counts for the limit of a trajectory: its own code, and its waiting while nothing else kept the thread."""

import inspect
import sysconfig
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_NOT_A_USERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
_INSTALLED = "site-packages"


class ThreadTime:
    """Time of the thread that runs all trajectories: what it does now, and for how long it has had nothing to do.

    Args:
        clock: Seconds on a clock that only goes forward.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self.step: tuple[TrajectoryTimer, float] | None = None
        """Trajectory whose code runs now, and since when; None: none does."""

    def now(self) -> float:
        """Return the seconds on the clock."""
        return self._clock()

    @property
    def is_in_a_call(self) -> bool:
        """True while the thread is in a call for many trajectories, of the engine or the reward function."""
        return self._busy_since is not None and self.step is None

    def idle_s(self) -> float:
        """Return the seconds so far in which the thread waited, as no trajectory's code and no call for many of them
        ran.
        """
        now, since = self._clock(), self._busy_since
        return now - self._busy_s - (now - since if since is not None else 0.0)

    @contextmanager
    def call_for_many(self) -> Iterator[None]:
        """Count what runs inside for none of the trajectories."""
        self._busy_since, self.step = self._clock(), None
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def step_of(self, timer: "TrajectoryTimer") -> Iterator[None]:
        """Count what runs inside for one trajectory."""
        self._busy_since = since = self._clock()
        self.step = timer, since
        try:
            yield
        finally:
            self.step = None
            timer.own_s += self._clock() - since
            self._end()

    def _end(self) -> None:
        assert self._busy_since is not None
        self._busy_s += self._clock() - self._busy_since
        self._busy_since = None


class TrajectoryTimer:
    """Timer of one trajectory.

    Args:
        label: Name of the trajectory in messages.
        coroutine: Its code.
        thread: Time of the thread that runs it.
        timeout_s: Seconds that it may take; None: no limit.

    Attributes:
        label: As given.
        timeout_s: As given.
        own_s: Seconds of its finished steps and waits.
        is_over: It has taken longer than its limit.
        ended_at: Line of its code at which it was then.
    """

    def __init__(
        self, label: str, coroutine: Coroutine[Any, Any, object], thread: ThreadTime, timeout_s: float | None = None
    ):
        self.label, self.timeout_s = label, timeout_s
        self.own_s = 0.0
        self.is_over = False
        self.ended_at = ""
        self._coroutine, self._thread = coroutine, thread
        self._waiting_since: float | None = thread.idle_s()

    def seconds(self) -> float:
        """Return the seconds up to now."""
        found, step, waiting_since = self.own_s, self._thread.step, self._waiting_since
        if step is not None and step[0] is self:
            found += self._thread.now() - step[1]
        if waiting_since is not None:
            found += self._thread.idle_s() - waiting_since
        return found

    @contextmanager
    def waits_for_others(self) -> Iterator[None]:
        """Count none of the waiting inside: it lasts until all trajectories wait, and one call has answered them."""
        assert self._waiting_since is not None
        self.own_s += self._thread.idle_s() - self._waiting_since
        self._waiting_since = None
        try:
            yield
        finally:
            self._waiting_since = self._thread.idle_s()

    def expire(self, place: str) -> None:
        """Note that it has taken longer than its limit, and where it was."""
        self.is_over, self.ended_at = True, place

    def where(self) -> str:
        """Return the line of its code at which it waits, such as `tools.py:41 in look_up`."""
        frames: list[FrameType] = []
        coroutine: object = self._coroutine
        while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
            frames.append(coroutine.cr_frame)
            coroutine = coroutine.cr_await
        return _innermost(frames)


def where(frame: FrameType | None) -> str:
    """Return the innermost line of a user's code in the stack of a frame that runs."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _innermost(frames[::-1])


def _innermost(frames: list[FrameType]) -> str:
    """Name the innermost frame that is neither Python's own nor this package's nor an installed one's."""
    own = [frame for frame in frames if _is_users(frame.f_code.co_filename)] or frames
    if not own:
        return "its end"
    code, line = own[-1].f_code, own[-1].f_lineno
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_A_USERS) and _INSTALLED not in filename

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of rollouts in time: trajectories that hang, code that blocks the thread of all of them, requests to stop."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from nemo_rl_moe.alarms import TimeIsUp
from nemo_rl_moe.distributed.run_process import leave
from nemo_rl_moe.errors import EXIT_RUN_FAILED, report_error
from nemo_rl_moe.rollouts.trajectory_timer import ThreadTime, TrajectoryTimer, where

TIMEOUT_KEY = "env.rollout_timeout_s"
DRIVER_KEY = "env.driver"
STOP_GRACE_S = 10.0
"""Seconds that a step may make no progress after a request to stop; then it is given up."""
BLOCKED_S = 5.0
"""Seconds that a trajectory's code may keep the thread of all before the user hears of it."""
QUIET_S = 10.0
"""Seconds without progress after which the user hears who is waited for, then after twice as many, and so on."""
STUBBORN_S = 30.0
"""Seconds that code may go on after it has been interrupted, before the process is ended."""
POLL_S = 0.25
INTERRUPTION = signal.SIGRTMIN
"""Signal that interrupts code which blocks: none that libraries use, as they do SIGALRM for limits of their own."""
_OWN_FOLDER = str(Path(__file__).parent)
_AGAIN_S = 1.0
_MOST_REPORTED = 4
_STACK_FRAMES = 6


class RolloutsGivenUpError(Exception):
    """A request to stop met rollouts that made no progress; nothing of their step is kept."""


def _end_the_process(text: str) -> NoReturn:
    report_error(text)
    leave(EXIT_RUN_FAILED)


@dataclass
class RolloutLimits:
    """Limits of a run's rollouts, and where the user hears of what they meet.

    Attributes:
        timeout_s: Seconds of one trajectory's own code and waiting; None: no limit.
        name: Name of the user's function; None: trajectories are driven by no code of the user's.
        stop_reason: Returns the request to stop, such as "SIGTERM"; None while there is none.
        message: Receives a line on rollouts that take long.
        warn: Receives a line on code that blocks, or on a step that is given up.
        clock: Seconds on a clock that only goes forward.
        end_process: Ends the process with a text, where code does not let itself be interrupted.
        has_warned_of_blocking: Whether the user has heard of code that blocks: once a run.
    """

    timeout_s: float | None = None
    name: str | None = None
    stop_reason: Callable[[], str | None] = lambda: None
    message: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    end_process: Callable[[str], None] = _end_the_process
    has_warned_of_blocking: bool = field(default=False, init=False)


def timeout_text(timer: TrajectoryTimer) -> str:
    """Return why a trajectory has failed that took longer than its limit, and where it was then."""
    assert timer.timeout_s is not None
    return f"took longer than {TIMEOUT_KEY}={timer.timeout_s:g} (at {timer.ended_at or timer.where()})"


class RolloutWatch:
    """Watch over the trajectories of one call: a context in which a thread looks at what their thread does.

    Code that blocks the main thread is interrupted by a signal, whose handler raises `TimeIsUp` in it. Other
    threads get no signals: where rollouts run in one, such code is reported, and ends the process in the end; after a
    request to stop at once, as nothing is left to wait for.

    Args:
        limits: Limits, and how to report what breaks them.
        thread: Time of the thread that runs the trajectories.
    """

    def __init__(self, limits: RolloutLimits, thread: ThreadTime):
        self._limits, self._time = limits, thread
        self._timers: Sequence[TrajectoryTimer] = ()
        self._unfinished: Callable[[], Sequence[TrajectoryTimer]] = list
        self._progress_at = thread.now()
        self._stop_seen_at: float | None = None
        self._given_up = ""
        self._next_notice_s = QUIET_S
        self._main = threading.get_ident()
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._blocked = "the run's main thread" if self._interrupts else "the thread of all rollouts"
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rollout watch", daemon=True)
        self._former_handler: Any = None

    def observe(self, timers: Sequence[TrajectoryTimer], unfinished: Callable[[], Sequence[TrajectoryTimer]]) -> None:
        """Say whom to watch.

        Args:
            timers: Of all trajectories.
            unfinished: Returns the timers of those that are waited for now.
        """
        self._timers, self._unfinished = timers, unfinished

    def __enter__(self) -> "RolloutWatch":
        if self._interrupts:
            self._former_handler = signal.signal(INTERRUPTION, self._interrupt)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._watcher.join()
        if self._interrupts:
            signal.signal(INTERRUPTION, self._former_handler)

    def note_start(self) -> None:
        """Note that a trajectory begins: silence before, as between two steps of asynchronous rollouts, is not its
        own.
        """
        self._next_notice_s = QUIET_S
        self.note_progress()

    def note_progress(self) -> None:
        """Note that a trajectory has begun or ended, has asked for something, or has got its answer."""
        self._progress_at = self._time.now()

    def has_expired(self, timer: TrajectoryTimer) -> bool:
        """Return whether a trajectory has taken longer than its limit."""
        return timer.is_over or (timer.timeout_s is not None and timer.seconds() > timer.timeout_s)

    def check_request_to_stop(self) -> None:
        """Give the rollouts up where they make no progress after a request to stop.

        Raises:
            RolloutsGivenUpError: They do not.
        """
        if self._gives_up_for_s() > 0:
            self._given_up = self._given_up or self._giving_up()
        if self._given_up:
            self._limits.warn(self._given_up)
            raise RolloutsGivenUpError(self._given_up)

    def _giving_up(self) -> str:
        return (
            f"{self._limits.stop_reason()}: rollouts are given up, as no trajectory has gone on for {STOP_GRACE_S:g} s;"
            f" waited for {self._described(self._unfinished())}"
        )

    def _gives_up_for_s(self) -> float:
        """Return the seconds since which rollouts are to be given up; negative before, and where nobody asks to
        stop.
        """
        now = self._time.now()
        if self._limits.stop_reason() is None:
            return float("-inf")
        if self._stop_seen_at is None:
            self._stop_seen_at = now
        return now - max(self._stop_seen_at, self._progress_at) - STOP_GRACE_S

    def _watch(self) -> None:
        """Watch in the thread until it is closed."""
        while not self._has_ended.wait(POLL_S):
            if self._time.is_in_a_call:
                continue
            step = self._time.step
            self._report_who_is_waited_for()
            if step is not None:
                self._look_at_step(*step)

    def _look_at_step(self, timer: TrajectoryTimer, since: float) -> None:
        """Deal with code of a trajectory that keeps the thread."""
        lasts_s = self._time.now() - since
        if lasts_s > BLOCKED_S and not self._limits.has_warned_of_blocking:
            self._limits.has_warned_of_blocking = True
            self._limits.warn(self._blocking(timer, lasts_s))
        if self._is_to_be_interrupted(timer, since) and self._time.step == (timer, since):
            if self._interrupts:
                signal.pthread_kill(self._main, INTERRUPTION)
            timeout_s = timer.timeout_s
            stops_for_s = self._gives_up_for_s() + (0.0 if self._interrupts else STUBBORN_S)
            too_long_s = max(stops_for_s, float("-inf") if timeout_s is None else lasts_s - timeout_s)
            if too_long_s > STUBBORN_S:
                self._limits.end_process(
                    f"{DRIVER_KEY}: {self._limits.name} keeps {self._blocked} for {lasts_s:.0f} s and does not let"
                    f" itself be interrupted ({timer.label}, at {self._place_of(timer)}; {TIMEOUT_KEY}:"
                    f" {'null' if timeout_s is None else f'{timeout_s:g}'}); the run ends"
                )

    def _is_to_be_interrupted(self, timer: TrajectoryTimer, since: float) -> bool:
        if self._given_up or self._gives_up_for_s() > 0:
            return True
        # One that has been interrupted may clean up.
        return self.has_expired(timer) and not (timer.is_over and self._time.now() - since < _AGAIN_S)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal, in the main thread: raise in the code that keeps it, unless that has just ended."""
        step = self._time.step
        # What this package does between two awaits is done whole; the watcher asks again.
        is_ours = frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER)
        if step is None or is_ours or not self._is_to_be_interrupted(*step):
            return
        timer, _ = step
        if self.has_expired(timer) and not timer.is_over:
            timer.expire(where(frame))
        if self._gives_up_for_s() > 0:
            self._given_up = self._given_up or self._giving_up()
        raise TimeIsUp

    def _report_who_is_waited_for(self) -> None:
        quiet_s = self._time.now() - self._progress_at
        if quiet_s < self._next_notice_s:
            return
        unfinished = self._unfinished()
        if not unfinished:
            return
        self._next_notice_s *= 2
        self._limits.message(
            f"rollouts: no progress for {quiet_s:.0f} s; {len(self._timers) - len(unfinished)} of {len(self._timers)}"
            f" trajectories have ended or wait for the others; running: {self._described(unfinished)}"
        )

    def _described(self, timers: Sequence[TrajectoryTimer]) -> str:
        timers = sorted(timers, key=lambda timer: timer.seconds(), reverse=True)
        shown = [
            f"{timer.label} ({timer.seconds():.0f}{_of_limit(timer)} s, at {self._place_of(timer)})"
            for timer in timers[:_MOST_REPORTED]
        ]
        more = [f"{len(timers) - _MOST_REPORTED} more"] if len(timers) > _MOST_REPORTED else []
        return ", ".join([*shown, *more])

    def _place_of(self, timer: TrajectoryTimer) -> str:
        step = self._time.step
        blocks = step is not None and step[0] is timer
        return where(sys._current_frames().get(self._main)) if blocks else timer.where()

    def _blocking(self, timer: TrajectoryTimer, lasts_s: float) -> str:
        frame = sys._current_frames().get(self._main)
        own: list[traceback.FrameSummary] = []
        for entry in traceback.extract_stack(frame):
            # What is above this package's last frame is asyncio's and the run's.
            own = [] if Path(entry.filename).parent == Path(__file__).parent else [*own, entry]
        stack = "".join(traceback.format_list(own[-_STACK_FRAMES:]))
        return (
            f"{DRIVER_KEY}: {self._limits.name} has kept {self._blocked} for {lasts_s:.0f} s ({timer.label}, at"
            f" {where(frame)}), and all other trajectories wait meanwhile: await something that does not block, or"
            f" await asyncio.to_thread(...). Its stack:\n{stack.rstrip()}"
        )


def _of_limit(timer: TrajectoryTimer) -> str:
    return "" if timer.timeout_s is None else f" of {timer.timeout_s:g}"

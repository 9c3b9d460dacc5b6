# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits of rollouts in time: trajectories that hang, code that blocks the thread of all of them, requests to stop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nemo_rl_moe.rollouts.trajectory_timer import RolloutClock, TrajectoryTimer

TIMEOUT_KEY = "env.rollout_timeout_s"
STOP_GRACE_S = 10.0
"""Seconds that a step may make no progress after a request to stop; then it is given up."""
BLOCKED_S = 5.0
"""Seconds that a trajectory's code may keep the thread of all before the user hears of it."""
QUIET_S = 10.0
"""Seconds without progress after which the user hears who is waited for, then after twice as many, and so on."""
_MOST_REPORTED = 4


class RolloutsGivenUpError(Exception):
    """A request to stop met rollouts that made no progress; nothing of their step is kept."""


@dataclass
class RolloutLimits:
    """Limits of a run's rollouts, and where the user hears of what they meet.

    Attributes:
        timeout_s: Seconds of one trajectory's own code and waiting; None: no limit.
        name: Name of the user's function; None: trajectories are driven by no code of the user's.
        stop_reason: Returns the request to stop, such as "SIGTERM"; None while there is none.
        warn: Receives a line on code that blocks, or on a step that is given up.
        has_warned_of_blocking: Whether the user has heard of code that blocks: once a run.
    """

    timeout_s: float | None = None
    name: str | None = None
    stop_reason: Callable[[], str | None] = lambda: None
    message: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    has_warned_of_blocking: bool = field(default=False, init=False)

    def timeout_text(self, place: str) -> str:
        """Return why a trajectory has failed that took longer than its limit, and where it was then."""
        assert self.timeout_s is not None
        return f"took longer than {TIMEOUT_KEY}={self.timeout_s:g} (at {place})"


class RolloutWatch:
    """Watch over the trajectories of one call, which looks at them between their steps."""

    def __init__(self, limits: RolloutLimits, clock: RolloutClock):
        self._limits, self._clock = limits, clock
        self._progress_at = self._looked_at = clock.now()
        self._stop_seen_at: float | None = None
        self._next_notice_s = QUIET_S

    def note_progress(self) -> None:
        """Note that a trajectory has ended, has asked for something, or has got its answer."""
        self._progress_at = self._clock.now()

    def has_expired(self, timer: TrajectoryTimer) -> bool:
        """Return whether a trajectory has taken longer than its limit."""
        return self._limits.timeout_s is not None and timer.seconds() > self._limits.timeout_s

    def warn_of_blocking(self) -> None:
        """Warn, once a run, where code has kept the thread since the last call of this."""
        now = self._clock.now()
        lasted_s, self._looked_at = now - self._looked_at, now
        if self._limits.name and lasted_s > BLOCKED_S and not self._limits.has_warned_of_blocking:
            self._limits.has_warned_of_blocking = True
            self._limits.warn(
                f"env.rollout: {self._limits.name} has kept the run's main thread for {lasted_s:.0f} s, and all other"
                " trajectories wait meanwhile: await something that does not block, or await asyncio.to_thread(...)"
            )

    def look(self, timers: Sequence[TrajectoryTimer], unfinished: Sequence[TrajectoryTimer]) -> None:
        """Report who is waited for, and give the rollouts up where they make no progress after a request to stop.

        Raises:
            RolloutsGivenUpError: They make no progress.
        """
        self.warn_of_blocking()
        now = self._clock.now()
        quiet_s = now - self._progress_at
        if unfinished and quiet_s >= self._next_notice_s:
            self._next_notice_s *= 2
            self._limits.message(
                f"rollouts: no progress for {quiet_s:.0f} s; {len(timers) - len(unfinished)} of {len(timers)}"
                f" trajectories have ended or wait for the others; running: {self._described(unfinished)}"
            )
        if (reason := self._limits.stop_reason()) is None:
            return
        if self._stop_seen_at is None:
            self._stop_seen_at = now
        if now - max(self._stop_seen_at, self._progress_at) > STOP_GRACE_S:
            text = (
                f"{reason}: rollouts are given up, as no trajectory has gone on for {STOP_GRACE_S:g} s; waited for"
                f" {self._described(unfinished)}"
            )
            self._limits.warn(text)
            raise RolloutsGivenUpError(text)

    def _described(self, timers: Sequence[TrajectoryTimer]) -> str:
        timers = sorted(timers, key=lambda timer: timer.seconds(), reverse=True)
        limit_s = self._limits.timeout_s
        of_limit = "" if limit_s is None else f" of {limit_s:g}"
        shown = [
            f"{timer.label} ({timer.seconds():.0f}{of_limit} s, at {timer.where()})"
            for timer in timers[:_MOST_REPORTED]
        ]
        more = [f"{len(timers) - _MOST_REPORTED} more"] if len(timers) > _MOST_REPORTED else []
        return ", ".join([*shown, *more])

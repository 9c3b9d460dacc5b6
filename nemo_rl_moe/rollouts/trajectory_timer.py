# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Time that counts for the limit of a trajectory: its code and its tools, without calls for many trajectories."""

import inspect
import sysconfig
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_NOT_A_USERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
_INSTALLED = "site-packages"


class RolloutClock:
    """Clock of all trajectories, which stands still during calls of engine or reward function for many of them."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._in_calls_s = 0.0

    def now(self) -> float:
        """Return the seconds that count."""
        return self._clock() - self._in_calls_s

    @contextmanager
    def call_for_many(self) -> Iterator[None]:
        """Count what runs inside for none of the trajectories."""
        start = self._clock()
        try:
            yield
        finally:
            self._in_calls_s += self._clock() - start


class TrajectoryTimer:
    """Timer of one trajectory."""

    def __init__(self, label: str, coroutine: Coroutine[Any, Any, object], clock: RolloutClock):
        self.label = label
        self._coroutine, self._clock = coroutine, clock
        self._own_s = 0.0
        self._since: float | None = clock.now()

    def seconds(self) -> float:
        """Return the seconds up to now."""
        return self._own_s if self._since is None else self._own_s + self._clock.now() - self._since

    @contextmanager
    def waits_for_others(self) -> Iterator[None]:
        """Count none of the waiting inside, for the engine or the reward function."""
        self._own_s, self._since = self.seconds(), None
        try:
            yield
        finally:
            self._since = self._clock.now()

    def where(self) -> str:
        """Return the line of its code at which it waits, such as `tools.py:41 in look_up`."""
        frames: list[FrameType] = []
        coroutine: object = self._coroutine
        while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
            frames.append(coroutine.cr_frame)
            coroutine = coroutine.cr_await
        # The innermost frame that is neither Python's own nor this package's nor an installed one's.
        own = [frame for frame in frames if _is_users(frame.f_code.co_filename)] or frames
        if not own:
            return "its end"
        code, line = own[-1].f_code, own[-1].f_lineno
        return f"{Path(code.co_filename).name}:{line} in {code.co_name}"


def _is_users(filename: str) -> bool:
    return not filename.startswith(_NOT_A_USERS) and _INSTALLED not in filename

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""When a run with a time limit must save and end."""

import time
from collections import deque
from collections.abc import Callable

from nemo_rl_moe.config.duration import parse_duration

_STEPS_LOOKED_AT = 10


class TimeLimit:
    """Stops a run while there is still time for what a step takes, validation and saving included.

    Args:
        must_save_by: Time after the start, DD:HH:MM:SS, as `checkpointing.checkpoint_must_save_by`; None: no limit.
        started: When the run started, in the clock's seconds; None: now.
        clock: Seconds on a clock that only goes forward.
    """

    def __init__(
        self, must_save_by: str | None, started: float | None = None, clock: Callable[[], float] = time.monotonic
    ):
        limit_s = parse_duration(must_save_by) if must_save_by is not None else None
        self._clock = clock
        self._last = clock()
        self._end = None if limit_s is None else (self._last if started is None else started) + limit_s
        self._durations: deque[float] = deque(maxlen=_STEPS_LOOKED_AT)

    def is_up_after_step(self) -> bool:
        """To be asked once at the end of each step: whether another one like the longest of late would be too long."""
        now = self._clock()
        self._durations.append(now - self._last)
        self._last = now
        return self._end is not None and now + max(self._durations) >= self._end

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The time limit of a run, before which it saves."""

import time
from collections.abc import Callable

from nemo_rl_moe.config.schema_run import parse_duration


class TimeLimit:
    """Time limit of a run. The run stops after the last step that leaves time to save.

    Further steps (with validation) and saves are assumed to take as long as the longest so far.

    Args:
        must_save_by: Time after the start as DD:HH:MM:SS (`checkpointing.checkpoint_must_save_by`). None for no limit.
        started: Start of the run on `clock`. None for now.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(
        self, must_save_by: str | None, started: float | None = None, clock: Callable[[], float] = time.monotonic
    ):
        limit_s = parse_duration(must_save_by) if must_save_by is not None else None
        self._clock = clock
        self._last = clock()
        self._end = None if limit_s is None else (self._last if started is None else started) + limit_s
        self._longest_step = self._longest_saving = 0.0

    def is_up_after_step(self) -> bool:
        """Return whether another step could exceed the limit. Call it once after each step."""
        now = self._clock()
        self._longest_step = max(self._longest_step, now - self._last)
        self._last = now
        return self._end is not None and now + self._longest_step + self._longest_saving >= self._end

    def note_saving(self, seconds: float) -> None:
        """Record the seconds from the beginning of a save to its complete checkpoint."""
        self._longest_saving = max(self._longest_saving, seconds)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The clock of an event loop, which a test moves forward."""

import asyncio
import time


class MovedClock:
    """Real seconds, and those by which a test has moved the clock."""

    def __init__(self) -> None:
        self._moved_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._moved_s

    def move(self, seconds: float) -> None:
        self._moved_s += seconds

    def move_soon(self, seconds: float) -> None:
        """Move it while everything waits."""
        asyncio.get_running_loop().call_later(0.02, self.move, seconds)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop with this clock."""
        found = asyncio.new_event_loop()
        found.time = self  # type: ignore[method-assign]
        return found

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An event loop whose time is simulated: it leaps to the next timer where a real one would wait for it.

Hours pass in milliseconds, and two runs of one script are the same. Where nothing is left that could ever happen,
waiting is an error at once, instead of a test that hangs.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
LONGEST_S = 10_000.0
"""Virtual seconds after which a script counts as one that never ends."""

MOST_TURNS = 20_000
"""Turns of the loop after which a script counts so, too: one may go on for ever without a second that passes."""


class NothingLeftError(Exception):
    """Everybody waits, and there is no timer: a deadlock. Or the script never ends."""


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self, longest_s: float, most_turns: int) -> None:
        super().__init__()
        self.now_s, self.num_turns = 0.0, 0
        self._longest_s, self._most_turns = longest_s, most_turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftError("everybody waits, and nothing is left that could happen")
        self.now_s += max(0.0, timeout)
        self.num_turns += 1
        if self.now_s > self._longest_s or self.num_turns > self._most_turns:
            raise NothingLeftError(f"it goes on after {self.now_s:g} s and {self.num_turns} turns")
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0; for one thread alone.

    Args:
        longest_s, most_turns: Where a script counts as one that never ends.
    """

    def __init__(self, longest_s: float = LONGEST_S, most_turns: int = MOST_TURNS) -> None:
        self._virtual = _NoWaiting(longest_s, most_turns)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual seconds."""
        return self._virtual.now_s

    def let_pass(self, seconds: float) -> None:
        """Let time pass in which the thread does something else, such as computing."""
        self._virtual.now_s += seconds

    def rewind(self) -> None:
        """Begin at 0 again."""
        self._virtual.now_s, self._virtual.num_turns = 0.0, 0


def run_virtually(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in virtual time; tasks that it leaves are cancelled. Errors of callbacks are raised."""
    loop, errors = VirtualLoop(), list[BaseException]()
    loop.set_exception_handler(lambda _, context: errors.append(context.get("exception") or RuntimeError(str(context))))
    try:
        result = loop.run_until_complete(coroutine)
    finally:
        loop.rewind()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.close()
    if errors:
        raise errors[0]
    return result

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


class NothingLeftError(Exception):
    """Everybody waits, and there is no timer: a deadlock. Or the script never ends."""


class _NoWaiting(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftError("everybody waits, and nothing is left that could happen")
        self.now_s += max(0.0, timeout)
        if self.now_s > LONGEST_S:
            raise NothingLeftError(f"it goes on after {LONGEST_S:g} s")
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0; for one thread alone."""

    def __init__(self) -> None:
        self._virtual = _NoWaiting()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual seconds."""
        return self._virtual.now_s

    def rewind(self) -> None:
        """Begin at 0 again."""
        self._virtual.now_s = 0.0


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

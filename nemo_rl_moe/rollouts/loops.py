# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Event loops of rollouts, in a separate thread or in the thread that waits for them."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
CLEANUP_S = 5.0
"""Seconds that code may take to end when it is cancelled."""


class RolloutLoop(Protocol):
    """An event loop of rollouts."""

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine, and return its result."""
        ...

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        """Run a last coroutine and end the loop, with all remaining tasks."""
        ...


class LoopThread:
    """An event loop in a separate thread, which also runs while the main thread trains."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        self.run(_finished(last))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class CallersLoop:
    """An event loop that only runs while its caller waits, for an engine that computes in the trainer's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(coroutine)

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        self.run(_finished(last))
        self._loop.close()


async def _finished(last: Coroutine[Any, Any, object] | None) -> None:
    if last is not None:
        await last
    await cancelled(asyncio.all_tasks() - {asyncio.current_task()})  # tasks that ignore the cancellation are abandoned


async def in_loop(function: Callable[[], Result]) -> Result:
    """Return the result of a function, called in the thread of the loop."""
    return function()


async def cancelled(tasks: Iterable["asyncio.Task[Any] | None"]) -> None:
    """Cancel tasks, wait for their end, and drop their errors."""
    found = [task for task in tasks if task is not None]
    running = [task for task in found if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=CLEANUP_S)
    for task in found:
        if task.done() and not task.cancelled():
            task.exception()  # otherwise asyncio reports it as never retrieved

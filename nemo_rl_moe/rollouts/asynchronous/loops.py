# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Event loops of rollouts: in a thread of its own beside training, or run by the thread that waits for them."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol, TypeVar

from nemo_rl_moe.rollouts.pool import cancel_all

Result = TypeVar("Result")
CLOSING_LIMIT_S = 20.0
"""Seconds for the end of a loop; cancelled groups, trajectories and other tasks take less, one after another."""


class RunCoroutine(Protocol):
    """Runs coroutines in the event loop of the rollouts."""

    def __call__(self, coroutine: Coroutine[Any, Any, Result], /) -> Result:
        """Run a coroutine to its end, and return its result."""
        ...


class RolloutLoop(Protocol):
    """An event loop of rollouts."""

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end, and return its result."""
        ...

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> bool:
        """Run a last coroutine and end the loop, with what still runs in it; return False where code blocks it."""
        ...


class LoopThread:
    """An event loop in a thread of its own, which goes on while the main thread trains.

    What ends the loop, as the `exit()` of a trajectory's code does, ends whoever waits for it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_loop, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop, and wait for its result."""
        result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        either: list[Future[Any]] = [result, self._ended]
        wait(either, return_when=FIRST_COMPLETED)
        if not result.done():
            self._ended.result()
        return result.result()

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException as error:
            self._ended.set_exception(error)

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> bool:
        """Run a last coroutine and end the loop, with what still runs in it.

        Returns:
            False where code blocks the thread for `CLOSING_LIMIT_S`: it is left behind, and ends with the process.
        """
        ending = asyncio.run_coroutine_threadsafe(_finished(last), self._loop)
        either: list[Future[Any]] = [ending, self._ended]
        wait(either, timeout=CLOSING_LIMIT_S, return_when=FIRST_COMPLETED)
        if not ending.done():
            if self._ended.done():
                self._ended.result()
            return False
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True


class CallersLoop:
    """An event loop that runs while its caller waits, and at no other time.

    An engine that shares the trainer's weights computes with them in the caller's thread, when it does not train.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run the loop until a coroutine has ended, and return its result."""
        return self._loop.run_until_complete(coroutine)

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> bool:
        """Run a last coroutine and end the loop, with what still runs in it; code that blocks it is interrupted."""
        self.run(_finished(last))
        self._loop.close()
        return True


async def _finished(last: Coroutine[Any, Any, object] | None) -> None:
    if last is not None:
        await last
    await cancel_all()


async def in_loop(function: Callable[[], Result]) -> Result:
    """Call a function in the thread of the loop that runs this."""
    return function()

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One thread for slow work on a disk, which never keeps a program from ending."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class DiskThread:
    """Does one thing after the other, beside the caller.

    A `ThreadPoolExecutor` would hold up the interpreter's exit for as long as a disk does not answer.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Has something done; cancelled where the thread is closed before its turn."""
        future: Future[Result] = Future()
        if self._is_closed.is_set():
            future.cancel()
        else:
            self._work.put((future, lambda: action(*arguments)))
        return future

    def close(self, timeout_s: float) -> bool:
        """Lets the thread finish what it is at and drops the rest; returns whether it has ended in so many seconds."""
        self._is_closed.set()
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, action = item
            if self._is_closed.is_set():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except BaseException as error:
                    future.set_exception(error)

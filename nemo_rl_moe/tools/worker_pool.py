# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the processes that run tools."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import ray

from nemo_rl_moe.distributed.light_workers import (
    CALL_SLACK_S,
    START_TIMEOUT_S,
    LightWorkers,
    check_start,
    kill,
    reason_of_end,
)
from nemo_rl_moe.distributed.worker_group import outcome
from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.tools.mcp_tools import Servers
from nemo_rl_moe.tools.results import ToolResult, error_text
from nemo_rl_moe.tools.worker import INTERRUPTION_S, ToolWorker, timed_out

_STOPPED = "no tool can be called: the tool workers have been stopped"
_LONGEST_REASON = 200


@dataclass(frozen=True)
class _Starting:
    """A worker that starts.

    Attributes:
        call: The call that starts it.
        deadline: Time at which it is given up.
    """

    number: int
    call: Any
    deadline: float


class ToolWorkers:
    """Processes that run tools, each one call at a time; a context manager. Ray must be running.

    A tool that hangs or ends its process costs its own call the result: the process is replaced.

    Args:
        references: Tools of the run.
        settings: Values of their keyword-only parameters.
        servers: MCP servers; each process has its own.
        num_workers: Calls that run at the same time; others wait.
        memory_mb: Megabytes that the tools of a process may take.
        most_characters: Longest result.

    Raises:
        WorkerDiedError: The tools cannot be loaded in a worker; carries the worker's own error.
    """

    def __init__(
        self,
        references: Sequence[str],
        settings: Mapping[str, Mapping[str, object]],
        *,
        num_workers: int,
        memory_mb: int,
        most_characters: int,
        servers: Servers | None = None,
    ):
        make = partial(
            ToolWorker,
            references=references,
            settings=settings,
            servers=servers or {},
            memory_mb=memory_mb,
            most_characters=most_characters,
        )
        self._workers = LightWorkers(make, num_workers)
        self._actors: dict[int, Any] = {}
        self._idle: SimpleQueue[int] = SimpleQueue()
        self._lock, self._is_stopped = threading.Lock(), False
        # A thread for each worker: it waits for the call, and not for the event loop, of which a run has several.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="tool calls")
        try:
            for starting in [self._start(number) for number in range(num_workers)]:
                self._finish_start(starting)
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> "ToolWorkers":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def call(self, name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        """Call a tool, once a worker is free.

        Args:
            name: One of the run's tools.
            arguments: As `checked_arguments` returns them.
            limit_s: Seconds that the tool may take; waiting for a worker does not count.

        Raises:
            WorkerDiedError: A worker was lost and cannot be replaced, or all have been stopped.
        """
        if self._is_stopped:
            raise WorkerDiedError(_STOPPED)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, name, arguments, limit_s)

    def shutdown(self) -> None:
        """Stop all workers, and so the calls that run. Does nothing the second time."""
        with self._lock:
            self._is_stopped = True
            actors, self._actors = self._actors, {}
        for number, actor in actors.items():
            kill(actor)
            self._idle.put(number)  # wakes a call that waits for a worker which could not be replaced
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        number = self._idle.get()
        with self._lock:
            if self._is_stopped:
                raise WorkerDiedError(_STOPPED)
            actor = self._actors[number]
        allowed_s = limit_s + INTERRUPTION_S + CALL_SLACK_S
        started_at = time.monotonic()
        call = actor.call.remote(allowed_s, ToolWorker.call, name, arguments, limit_s)
        is_over = bool(ray.wait([call], timeout=allowed_s)[0])
        result = outcome(call) if is_over else None
        if isinstance(result, ToolResult):
            self._idle.put(number)
            return result
        took_s = time.monotonic() - started_at
        self._finish_start(self._start(number))
        if took_s >= limit_s:
            return timed_out(limit_s)
        reason = reason_of_end(result)[:_LONGEST_REASON]
        return ToolResult(error_text(f"the process of the tool ended: {reason}"), Fault.DIED, seconds=took_s)

    def _start(self, number: int) -> _Starting:
        """Start a worker, in place of an earlier one with its number."""
        with self._lock:
            if self._is_stopped:
                raise WorkerDiedError(_STOPPED)
            if number in self._actors:
                kill(self._actors[number])
            self._actors[number], call = self._workers.start(number)
        return _Starting(number, call, time.monotonic() + START_TIMEOUT_S)

    def _finish_start(self, starting: _Starting) -> None:
        """Wait until a worker has started."""
        ready, _ = ray.wait([starting.call], timeout=max(0.0, starting.deadline - time.monotonic()))
        check_start(
            f"tool worker {starting.number}", outcome(starting.call) if ready else "no answer", starting.deadline
        )
        self._idle.put(starting.number)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The pool of processes that run tools, as the driver sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Self

from nemo_rl_moe.distributed.worker_pool import Lost, WorkerPool
from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.tools.mcp_tools import Servers
from nemo_rl_moe.tools.results import CallTool, ToolResult, error_text
from nemo_rl_moe.tools.worker import INTERRUPTION_S, CallingTrajectory, ToolWorker, timed_out

CLOSE_LIMIT_S = 10.0
"""Seconds in which the objects of a trajectory must be closed."""
_LONGEST_REASON = 200


class ToolWorkers:
    """Context manager that starts processes for tools. Each process runs one call at a time. Requires a running Ray.

    If a tool hangs or ends its process, only this call has no result, and the process is replaced.

    Args:
        settings: Name of a tool or class -> values of its keyword-only parameters.
        servers: MCP servers. Each process starts all of them.
        num_workers: Number of processes, so of calls that run at the same time. Other calls wait.
        methods: Names of the tools that are methods. If there are any, all calls of a trajectory go to one process.
        warn: Receives a line at the first failure to close the objects of a trajectory.
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
        methods: Collection[str] = (),
        warn: Callable[[str], None] = print,
    ):
        make = partial(
            ToolWorker,
            references=references,
            settings=settings,
            servers=servers or {},
            memory_mb=memory_mb,
            most_characters=most_characters,
        )
        self._methods, self._warn, self._has_warned = methods, warn, False
        self._numbers, self._closing = count(), set[Future[ToolResult | Lost]]()
        # A pool of one process is a process that calls can select.
        sizes = [1] * num_workers if methods else [num_workers]
        with ThreadPoolExecutor(len(sizes)) as threads:
            starts = [threads.submit(WorkerPool, "tool worker", make, size) for size in sizes]
        self._pools: list[WorkerPool[ToolWorker]] = [each.result() for each in starts if each.exception() is None]
        self._num_open = [0] * len(sizes)
        for start in starts:
            if (error := start.exception()) is not None:
                self.shutdown()
                raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @asynccontextmanager
    async def calls(self, record: Mapping[str, Any]) -> AsyncIterator[CallTool]:
        """Yield the function that calls tools for one trajectory. At the end, close the objects of the trajectory.

        Args:
            record: Record of its prompt.
        """
        process = min(range(len(self._pools)), key=self._num_open.__getitem__)
        pool, trajectory = self._pools[process], CallingTrajectory(next(self._numbers), record, is_first=True)
        has_objects = False

        async def call(name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
            """Call a tool when a process is free, and return its result or error.

            Args:
                arguments: Arguments that `checked_arguments` has returned.
                limit_s: Maximum number of seconds of the call, not counting the time until a process is free.
            """
            nonlocal has_objects
            owner = None
            if name in self._methods:
                owner, has_objects = replace(trajectory, is_first=not has_objects), True
            asked = pool.submit(limit_s + INTERRUPTION_S, ToolWorker.call, name, arguments, limit_s, owner)
            found = await asyncio.wrap_future(asked)
            if not isinstance(found, Lost):
                return found
            if found.seconds >= limit_s:
                return timed_out(limit_s)
            reason = error_text(f"the process of the tool ended: {found.reason[:_LONGEST_REASON]}")
            return ToolResult(reason, Fault.DIED, seconds=found.seconds)

        self._num_open[process] += 1
        try:
            yield call
        finally:
            self._num_open[process] -= 1
            if has_objects:
                self._close(pool, trajectory.number)

    def _close(self, pool: WorkerPool[ToolWorker], trajectory: int) -> None:
        with suppress(WorkerDiedError):  # all are stopped, and their objects with them
            closing = pool.submit(CLOSE_LIMIT_S + INTERRUPTION_S, ToolWorker.close, trajectory, CLOSE_LIMIT_S)
            self._closing.add(closing)
            closing.add_done_callback(self._note_closed)

    def _note_closed(self, closing: "Future[ToolResult | Lost]") -> None:
        self._closing.discard(closing)
        if closing.cancelled() or closing.exception() is not None or self._has_warned:
            return
        result = closing.result()
        problem = result.reason if isinstance(result, Lost) else result.text
        if problem:
            self._has_warned = True
            self._warn(f"the state of a tool could not be closed: {problem}; further failures are not reported")

    def shutdown(self) -> None:
        """Stop all processes and their calls. A second call has no effect."""
        wait(list(self._closing), CLOSE_LIMIT_S)
        for pool in self._pools:
            pool.shutdown()

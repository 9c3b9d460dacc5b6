# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver's side of the processes that run tools."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

from nemo_rl_moe.distributed.worker_pool import Lost, WorkerPool
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.tools.mcp_tools import Servers
from nemo_rl_moe.tools.results import ToolResult, error_text
from nemo_rl_moe.tools.worker import INTERRUPTION_S, ToolWorker, timed_out

_LONGEST_REASON = 200


class ToolWorkers:
    """Processes that run tools, each one call at a time; a context manager. Ray must be running.

    A tool that hangs or ends its process costs its own call the result: the process is replaced.

    Args:
        settings: Values of the tools' keyword-only parameters.
        servers: MCP servers; each process has its own.
        num_workers: Calls that run at the same time; others wait.
        memory_mb: Megabytes that the tools of a process may take.
        most_characters: Longest result.
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
        self._pool = WorkerPool("tool worker", make, num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def call(self, name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        """Call a tool, once a worker is free.

        Args:
            name: One of the run's tools.
            arguments: As `checked_arguments` returns them.
            limit_s: Seconds that the tool may take; waiting for a worker does not count.
        """
        asked = self._pool.submit(limit_s + INTERRUPTION_S, ToolWorker.call, name, arguments, limit_s)
        found = await asyncio.wrap_future(asked)
        if not isinstance(found, Lost):
            return found
        if found.seconds >= limit_s:
            return timed_out(limit_s)
        reason = error_text(f"the process of the tool ended: {found.reason[:_LONGEST_REASON]}")
        return ToolResult(reason, Fault.DIED, seconds=found.seconds)

    def shutdown(self) -> None:
        """Stop all workers, and so the calls that run. Does nothing the second time."""
        self._pool.shutdown()

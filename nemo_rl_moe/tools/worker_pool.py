# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The pool of processes that run tools, as the driver sees it."""

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
    """Context manager that starts processes for tools. Each process runs one call at a time. Requires a running Ray.

    If a tool hangs or ends its process, only this call has no result, and the process is replaced.

    Args:
        settings: Name of a tool -> values of its keyword-only parameters.
        servers: MCP servers. Each process starts all of them.
        num_workers: Number of processes, so of calls that run at the same time. Other calls wait.
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
        """Call a tool when a process is free, and return its result or error.

        Args:
            arguments: Arguments that `checked_arguments` has returned.
            limit_s: Maximum number of seconds of the call, not counting the time until a process is free.
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
        """Stop all processes and their calls. A second call has no effect."""
        self._pool.shutdown()

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that runs tools, without the secrets in the run's environment, and with limits on time and memory."""

import faulthandler
import time
from collections.abc import Callable, Mapping, Sequence

from nemo_rl_moe.alarms import TimeIsUp, interrupted_after
from nemo_rl_moe.distributed.process_limits import forget_secrets, limit_memory
from nemo_rl_moe.errors import one_line
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.tools.definitions import load_tools, with_servers
from nemo_rl_moe.tools.mcp_tools import Servers, function_of, running, tools_of
from nemo_rl_moe.tools.results import ToolResult, as_text, cut, error_text

INTERRUPTION_S = 1.0
"""Number of seconds after the alarm at which the process is ended if the tool has not stopped."""
_STDERR = 2


class ToolWorker:  # pragma: no cover  (runs in other processes)
    """The tools of a run, in a process that runs one call at a time.

    Args:
        servers: MCP servers. They run as child processes of this process.
        memory_mb: Maximum number of megabytes that the process may allocate after its start.
        most_characters: Maximum number of characters of a result.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        references: Sequence[str],
        settings: Mapping[str, Mapping[str, object]],
        servers: Servers,
        memory_mb: int,
        most_characters: int,
    ):
        forget_secrets()
        tools = load_tools(references, settings)
        self._most_characters = most_characters
        limit_memory(memory_mb)
        self._servers = running(servers)  # each server inherits a memory limit of the same size
        self._tools = with_servers(
            tools,
            [
                (tool, function_of(server, tool))
                for name, server in self._servers.items()
                for tool in tools_of(name, server)
            ],
        )

    def call(self, name: str, arguments: Mapping[str, object], limit_s: float) -> ToolResult:
        """Call a tool, and return its result or error.

        An alarm signal interrupts the tool after `limit_s` seconds. If the signal cannot interrupt the tool's code,
        such as a loop in C, this process is ended, and the driver replaces it.
        """
        tool = self._tools[name]
        try:
            # A thread of faulthandler ends the process even if the interpreter is blocked.
            faulthandler.dump_traceback_later(limit_s + INTERRUPTION_S, exit=True, file=_STDERR)
            return call_within(
                limit_s, lambda: as_text(tool.function(**arguments, **tool.settings)), self._most_characters
            )
        finally:
            faulthandler.cancel_dump_traceback_later()


def call_within(limit_s: float, call: Callable[[], str], most_characters: int) -> ToolResult:
    """Return the result of a call, or its error. Requires the main thread, as the limit uses an alarm signal.

    Args:
        limit_s: Maximum number of seconds of the call. Code that never returns to the interpreter is not interrupted.
    """
    started_at = time.monotonic()
    try:
        with interrupted_after(limit_s):
            text, fault = _text_or_error(call)
    except TimeIsUp:
        return timed_out(limit_s)
    text, is_cut = cut(text, most_characters)
    return ToolResult(text, fault, is_cut, time.monotonic() - started_at)


def timed_out(limit_s: float) -> ToolResult:
    """Return the answer to a call that took too long."""
    return ToolResult(error_text(f"the tool gave no result within {limit_s:g} s"), Fault.TIMEOUT, seconds=limit_s)


def _text_or_error(call: Callable[[], str]) -> tuple[str, Fault | None]:
    try:
        return call(), None
    except TimeIsUp:
        raise
    except BaseException as error:  # also SystemExit, which would end the worker
        return error_text(one_line(error)), Fault.ERROR

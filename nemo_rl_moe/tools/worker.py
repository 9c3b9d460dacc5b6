# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that runs tools, without the secrets in the run's environment, and with limits on time and memory."""

import asyncio
import faulthandler
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_moe.alarms import TimeIsUp, interrupted_after
from nemo_rl_moe.distributed.process_limits import forget_secrets, limit_memory
from nemo_rl_moe.errors import one_line
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.tools.arguments import ArgumentError, checked_arguments
from nemo_rl_moe.tools.definitions import ToolState, load_tools, with_servers
from nemo_rl_moe.tools.mcp_tools import Servers, function_of, running, tools_of
from nemo_rl_moe.tools.results import ToolResult, as_text, cut, error_text

INTERRUPTION_S = 1.0
"""Number of seconds after the alarm at which the process is ended if the tool has not stopped."""
_STDERR = 2


@dataclass(frozen=True)
class CallingTrajectory:
    """The trajectory that calls a method.

    Attributes:
        number: Differs between all trajectories of the process.
        record: Record of its prompt.
        is_first: Whether this is its first call of a method.
    """

    number: int
    record: Mapping[str, Any]
    is_first: bool


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
        self._objects: dict[int, dict[type, object]] = {}
        self._loop = asyncio.new_event_loop()
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

    def call(
        self, name: str, arguments: Mapping[str, object], limit_s: float, trajectory: CallingTrajectory | None = None
    ) -> ToolResult:
        """Call a tool, and return its result or error.

        An alarm signal interrupts the tool after `limit_s` seconds. If the signal cannot interrupt the tool's code,
        such as a loop in C, this process is ended, and the driver replaces it.

        Args:
            trajectory: The trajectory whose object has the tool as a method. None for a function.
        """
        tool = self._tools[name]

        def called() -> str:
            objects = [] if tool.state is None or trajectory is None else [self._object(tool.state, trajectory)]
            checked = checked_arguments(arguments, tool.parameters, tool.usage, with_user_code=True)
            return as_text(self._awaited(tool.function(*objects, **checked, **tool.settings)))

        return self._within(limit_s, called)

    def close(self, trajectory: int, limit_s: float) -> ToolResult:
        """Close the objects of a trajectory that has ended. Return an error if one of them raises an error."""
        objects = self._objects.pop(trajectory, {})

        def closed() -> str:
            with ExitStack() as closing:
                for each in objects.values():
                    closing.callback(lambda close: self._awaited(close()), getattr(each, "close", lambda: None))
            return ""

        return self._within(limit_s, closed)

    def _object(self, state: ToolState, trajectory: CallingTrajectory) -> object:
        """Return the object of a trajectory. Make it at the first call."""
        if trajectory.is_first:
            self._objects[trajectory.number] = {}
        if (objects := self._objects.get(trajectory.number)) is None:
            raise RuntimeError("the state of the tool is lost, because its process has ended")
        if state.owner not in objects:
            objects[state.owner] = state.make(trajectory.record)
        return objects[state.owner]

    def _awaited(self, result: object) -> object:
        """Return a result. Wait for it if it is awaitable, in the loop of all calls of this process."""
        if not inspect.isawaitable(result):
            return result
        task = self._loop.create_task(_result_of(result))
        try:
            return self._loop.run_until_complete(task)
        finally:
            if not task.done():  # the alarm rang while the loop waited
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))

    def _within(self, limit_s: float, call: Callable[[], str]) -> ToolResult:
        try:
            # A thread of faulthandler ends the process even if the interpreter is blocked.
            faulthandler.dump_traceback_later(limit_s + INTERRUPTION_S, exit=True, file=_STDERR)
            return call_within(limit_s, call, self._most_characters)
        finally:
            faulthandler.cancel_dump_traceback_later()


async def _result_of(awaitable: Awaitable[object]) -> object:  # pragma: no cover
    return await awaitable


def call_within(limit_s: float, call: Callable[[], str], most_characters: int) -> ToolResult:
    """Return the result of a call, or its error. Requires the main thread, as the limit uses an alarm signal.

    Args:
        limit_s: Maximum number of seconds of the call. Code that never returns to the interpreter is not interrupted.
    """
    started_at = time.monotonic()
    try:
        with interrupted_after(limit_s):
            result = _result_or_error(call)
    except TimeIsUp:
        return timed_out(limit_s)
    text, is_cut = cut(result.text, most_characters)
    return replace(result, text=text, is_cut=is_cut, seconds=time.monotonic() - started_at)


def timed_out(limit_s: float) -> ToolResult:
    """Return the answer to a call that took too long."""
    return ToolResult(error_text(f"the tool gave no result within {limit_s:g} s"), Fault.TIMEOUT, seconds=limit_s)


def _result_or_error(call: Callable[[], str]) -> ToolResult:
    try:
        return ToolResult(call())
    except TimeIsUp:
        raise
    except ArgumentError as error:
        return ToolResult(error_text(str(error)), is_wrong=True)
    except BaseException as error:  # also SystemExit, which would end the worker
        return ToolResult(error_text(one_line(error)), Fault.ERROR)

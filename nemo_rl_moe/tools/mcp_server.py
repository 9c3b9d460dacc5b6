# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A server of the Model Context Protocol, which runs as a child process and communicates over its standard input and
output."""

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from nemo_rl_moe.config.environments.tools import McpServerConfig
from nemo_rl_moe.distributed.run_process import OWNER

Result = TypeVar("Result")
_ENDS_WITH_ITS_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Program that turns into the server. The kernel kills the server when the thread that started it ends."""
_STOP_S = 10.0
_MOST_PAGES = 100
_LAST_BYTES, _MOST_CHARACTERS = 1 << 16, 300
"""Number of last bytes of a server's standard error that are read, and maximum number of characters that are quoted."""


class McpToolError(Exception):
    """A server's tool has reported that it failed."""


class McpServer:
    """A server that is started at its first use, and restarted after a call that did not return.

    A thread communicates with the server, so that the caller can be interrupted.
    """

    def __init__(self, config: McpServerConfig):
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="MCP server", daemon=True)
        self._thread.start()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (as long as the server)
        self._session: Future[Any] | None = None
        self._closing = asyncio.Event()

    def start(self) -> None:
        """Begin to start the server unless it runs. Does not wait."""
        if self._session is None:
            self._session, self._closing = Future(), asyncio.Event()
            asyncio.run_coroutine_threadsafe(self._serve(self._session, self._closing), self._loop)

    def stop(self, timeout_s: float = 0.0) -> None:
        """Stop the server. A later call of a tool starts it again, unless the thread has been ended.

        Args:
            timeout_s: If positive, end the thread too, and wait for this at most this number of seconds.
        """
        self._session = None
        self._loop.call_soon_threadsafe(self._closing.set)
        if timeout_s:
            self._loop.call_soon_threadsafe(asyncio.ensure_future, self._end_thread())
            self._thread.join(timeout_s)

    def tools(self, timeout_s: float) -> list[Any]:
        """Return the mcp library's descriptions of the server's tools.

        Raises:
            TimeoutError: The server does not answer within `timeout_s` seconds.
        """
        return self._wait_for(_all_tools(self._ready(timeout_s)), timeout_s)

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool, and return its result as a text. If the caller is interrupted, the server is restarted.

        Raises:
            McpToolError: The tool reports that it has failed.
        """
        session = self._ready(None)
        try:
            result = self._wait_for(session.call_tool(name, dict(arguments)), None)
        except BaseException:
            self.stop()
            self.start()
            raise
        text = "\n".join(_as_text(part) for part in result.content)
        if getattr(result, "is_error", False) or getattr(result, "isError", False):
            raise McpToolError(text)
        return text

    def last_words(self) -> str:
        """Return the last line of the server's standard error, or an empty text."""
        # Only the end is read, because the file may have gigabytes in one line.
        size = os.fstat(self._errors.fileno()).st_size
        end = os.pread(self._errors.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode("utf-8", "replace")
        lines = [line for line in end.splitlines() if line.strip()]
        return lines[-1].strip()[-_MOST_CHARACTERS:] if lines else ""

    def _ready(self, timeout_s: float | None) -> Any:
        self.start()
        assert self._session is not None
        starting = self._session
        try:
            return starting.result(timeout_s)
        except Exception:
            if starting.done():  # The start has failed. After a timeout, the server continues to start.
                self._session = None
            raise

    def _wait_for(self, what: Coroutine[Any, Any, Result], timeout_s: float | None) -> Result:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout_s)

    async def _serve(self, ready: "Future[Any]", closing: asyncio.Event) -> None:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        config = self._config
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-c", _ENDS_WITH_ITS_PARENT, config.command, *config.args],
            # Passes on the variable by which the run finds and ends the child processes of servers.
            env={**config.env, **{name: os.environ[name] for name in (OWNER,) if name in os.environ}} or None,
        )
        try:
            async with stdio_client(parameters, errlog=self._errors) as streams, ClientSession(*streams) as session:
                await session.initialize()
                ready.set_result(session)
                await closing.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _end_thread(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait(others, timeout=_STOP_S) if others else None
        self._loop.stop()


async def _all_tools(session: Any) -> list[Any]:
    from mcp.types import PaginatedRequestParams

    found: list[Any] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        found += page.tools
        cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
        if not cursor:
            break
    return found


def _as_text(part: Any) -> str:
    """Return the text of a part of a result, or its type if the part is not a text."""
    return str(part.text) if part.type == "text" else f"[{part.type}]"

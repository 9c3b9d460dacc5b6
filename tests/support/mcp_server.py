# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A server of the Model Context Protocol for tests, as a program: `mcp_server.py [--mute | --fail | --empty]`."""

import os
import subprocess
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:  # before release 2
    from mcp.server.fastmcp import FastMCP as Server

server = Server("words")


def look_up(word: str, num_results: int = 3) -> str:
    """Look a word up."""
    return f"{word} x {num_results}"


def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


def hang() -> str:
    """Never return."""
    time.sleep(3600)
    return ""


def end() -> str:
    """End the server."""
    os._exit(3)


def start_child(option: str) -> str:
    """Start a process that outlives the server, and hang."""
    program = "import time; time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", program, option], stdin=subprocess.DEVNULL, start_new_session=True)
    return hang()


def environment() -> list[str]:
    """Return names of variables, and the server's process."""
    return [*sorted(os.environ), f"pid={os.getpid()}"]


if __name__ == "__main__":
    if "--fail" in sys.argv:
        sys.exit("words: no dictionary")
    if "--mute" in sys.argv:
        time.sleep(3600)
    if "--empty" not in sys.argv:
        for tool in (look_up, fail, hang, end, start_child, environment):
            server.add_tool(tool)
    server.run("stdio")

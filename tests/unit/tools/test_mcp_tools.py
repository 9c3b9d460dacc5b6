# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools of MCP servers: what the model is told of them, their results, and servers that fail."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl_moe.config.environments.tools import McpServerConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.tools import mcp_tools
from nemo_rl_moe.tools.arguments import ArgumentError, checked_arguments
from nemo_rl_moe.tools.definitions import load_tools, with_servers
from nemo_rl_moe.tools.mcp_server import McpServer
from nemo_rl_moe.tools.worker import call_within

SERVER = Path(__file__).parents[2] / "support/mcp_server.py"
LIMIT_S = 120.0


def config(*options: str, **variables: str) -> McpServerConfig:
    return McpServerConfig(command=sys.executable, args=[str(SERVER), *options], env=variables)


def call(server: McpServer, name: str, limit_s: float = LIMIT_S, **arguments: object) -> tuple[str, Fault | None]:
    """Return what the model reads, and the fault."""
    result = call_within(limit_s, lambda: server.call(name, arguments), 10_000)
    return result.text, result.fault


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if str(SERVER) in " ".join(each.cmdline())]


def require_end(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=LIMIT_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def server(own_alarm: None) -> Iterator[McpServer]:
    pytest.importorskip("mcp", reason="without mcp: make test-libraries")
    running = McpServer(config(SOME_WORD="chat"))
    yield running
    running.stop(LIMIT_S)
    assert not running._thread.is_alive()
    for child in children():
        require_end(child)


def test_definitions_are_those_of_the_server() -> None:
    pytest.importorskip("mcp", reason="without mcp: make test-libraries")
    found = {tool.name: tool for tool in mcp_tools.describe_servers({"words": config()})}
    assert list(found) == ["look_up", "fail", "hang", "end", "start_child", "environment"]
    shown = found["look_up"].definition["function"]
    assert shown["description"] == "Look a word up."
    assert shown["parameters"]["properties"]["word"]["type"] == "string"
    assert shown["parameters"]["required"] == ["word"]
    tools = with_servers(load_tools(["calculator"], {}), [(tool, print) for tool in found.values()])
    assert list(tools)[:2] == ["calculator", "look_up"]
    look_up = tools["look_up"]
    assert look_up.usage == "look_up(word: string, num_results: integer = 3)"
    assert checked_arguments({"word": "chat", "num_results": "4"}, look_up.parameters, "") == {
        "word": "chat",
        "num_results": 4,
    }
    with pytest.raises(ArgumentError, match="the argument word is missing"):
        checked_arguments({}, look_up.parameters, look_up.usage)
    assert not children()


def test_two_tools_of_one_name_are_refused() -> None:
    pytest.importorskip("mcp", reason="without mcp: make test-libraries")
    found = mcp_tools.describe_servers({"words": config(), "more": config()})
    with pytest.raises(ConfigurationError, match=r"env.driver.mcp_servers.more: another tool has the name 'look_up'"):
        with_servers({}, [(tool, print) for tool in found])


def test_results_and_errors_are_texts_for_the_model(server: McpServer) -> None:
    assert call(server, "look_up", word="chat") == ("chat x 3", None)
    text, fault = call(server, "fail", reason="no such word")
    assert (text.startswith("error: McpToolError: "), fault) == (True, Fault.ERROR)
    assert "no such word" in text or "fail" in text
    names = call(server, "environment")[0]
    assert "SOME_WORD" in names
    assert "PYTEST_CURRENT_TEST" not in names, "the run's own variables, which may be secrets, are not for servers"


def test_a_call_that_hangs_ends_the_server_and_the_next_call_has_another(server: McpServer) -> None:
    call(server, "look_up", word="chat")
    (first,) = children()
    text, fault = call(server, "hang", limit_s=1.0)
    assert (text, fault) == ("error: the tool gave no result within 1 s", Fault.TIMEOUT)
    assert call(server, "look_up", word="chien") == ("chien x 3", None)
    require_end(first)


def test_a_server_that_ends_costs_its_call(server: McpServer) -> None:
    text, fault = call(server, "end")
    assert (text.startswith("error: "), fault) == (True, Fault.ERROR)
    assert call(server, "look_up", word="chien") == ("chien x 3", None)


def test_a_server_ends_with_the_process_that_started_it() -> None:
    """It does not look at its input, whose end would tell it."""
    pytest.importorskip("mcp", reason="without mcp: make test-libraries")
    code = (
        "import sys, time, psutil\n"
        "from nemo_rl_moe.config.environments.tools import McpServerConfig\n"
        "from nemo_rl_moe.tools.mcp_server import McpServer\n"
        f"McpServer(McpServerConfig(command=sys.executable, args=[{str(SERVER)!r}, '--mute'], env={{}})).start()\n"
        "found = []\n"
        "while not found:\n"
        f"    found = [each.pid for each in psutil.Process().children() if {str(SERVER)!r} in each.cmdline()[1:2]]\n"
        "    time.sleep(0.05)\n"
        "print(found[0], flush=True)\n"
        "time.sleep(3600)\n"
    )
    parent = psutil.Popen([sys.executable, "-c", code], stdout=-1, text=True, cwd=SERVER.parents[2])
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    require_end(process)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            config("--fail"),
            r"env.driver.mcp_servers.words: the server does not start: .*; its last line of output: words: no",
        ),
        (config("--mute"), r"env.driver.mcp_servers.words: the server gave no answer within 2 s"),
        (config("--empty"), r"env.driver.mcp_servers.words: the server has no tools"),
        (
            McpServerConfig(command="no-such-program"),
            r"env.driver.mcp_servers.words.command: got 'no-such-program', expected",
        ),
    ],
)
def test_servers_that_cannot_be_used_are_told_before_a_run(
    wrong: McpServerConfig, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp", reason="without mcp: make test-libraries")
    if "--mute" in wrong.args:
        monkeypatch.setattr(mcp_tools, "START_S", 2.0)
    with pytest.raises(ConfigurationError, match=message) as error:
        mcp_tools.describe_servers({"words": wrong})
    assert "\n" not in str(error.value)
    for child in children():
        require_end(child)


def test_without_the_library_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    mcp_tools._described.cache_clear()
    with pytest.raises(
        ConfigurationError, match=r"env.driver.mcp_servers.words: mcp cannot be imported; pip install 'nemo-rl"
    ):
        mcp_tools.describe_servers({"words": config()})


def test_what_a_server_said_last_is_cut() -> None:
    server = McpServer(McpServerConfig(command="false"))
    server._errors.write("first\n" + "y" * 1_000_000 + "z\n")
    server._errors.flush()
    assert server.last_words() == "y" * 299 + "z"

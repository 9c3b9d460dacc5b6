# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The endpoint's server and what it refuses; processes of agents that raise, hang or die."""

import asyncio
import json
import socket
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.errors import WorkerDiedError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.agents import worker_pool
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.requests import RequestSettings
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.worker import AgentProgram
from nemo_rl_moe.rollouts.agents.worker_pool import AgentWorkers
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.agents_of_tests import MARK
from tests.support.conversations import ALL, MODEL, QUESTION, ended, scripted_session

QWEN = ALL["Qwen3, Qwen3-MoE"]
SAMPLING = SamplingParameters(100, temperature=0.7)
RULES = RequestRules(MODEL, SAMPLING, is_strict=True)
BODY: dict[str, Any] = {"model": MODEL, "messages": [QUESTION]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PROGRAM = AgentProgram("tests.support.agents_of_tests:agent", (), memory_mb=4000)


def answered(body: object) -> "Future[dict[str, Any]]":
    future: Future[dict[str, Any]] = Future()
    future.set_result({"answered": body})
    return future


def post(url: str, key: str, body: object = BODY, path: str = "/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}{path}", content=content, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def test_the_server_listens_on_loopback_with_a_key_of_the_run_and_a_path_of_the_trajectory() -> None:
    with EndpointServer(MODEL) as server, EndpointServer(MODEL) as another:
        assert server.key != another.key
        own = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert [each.ip for each in own if each.port == server.port] == ["127.0.0.1"]
        with server.session(answered) as url, server.session(answered) as second:
            assert url.startswith(f"http://127.0.0.1:{server.port}/sessions/")
            assert url != second
            assert post(url, server.key).json() == {"answered": BODY}
            for key in ("x", server.key[:-1], another.key):
                refused = post(url, key)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert httpx.post(f"{url}/chat/completions", json=BODY).status_code == 401
            no_text = {"Authorization": b"Bearer \xff\xfe"}
            assert httpx.post(f"{url}/chat/completions", json=BODY, headers=no_text).status_code == 401
            # Who has no key does not learn which paths there are.
            assert post(f"http://127.0.0.1:{server.port}/elsewhere", "x").status_code == 401
            assert post(url, server.key, b"{").status_code == 400
            assert post(url, server.key, b"[" * 100_000).status_code == 400
            for name, value in (("Content-Type", "application/json; charset=none"), ("Content-Encoding", "gzip")):
                headers = {"Authorization": f"Bearer {server.key}", name: value}
                assert httpx.post(f"{url}/chat/completions", content=b"\xff", headers=headers).status_code == 400
            other = post(url, server.key, path="/responses")
            assert other.status_code == 404
            assert "expected POST .../v1/chat/completions or GET .../v1/models" in other.json()["error"]["message"]
        ended_session = post(url, server.key)
        assert (ended_session.status_code, ended_session.json()["error"]["code"]) == (404, "session_not_found")
        unknown = url.replace("/sessions/", "/sessions/x")
        assert post(unknown, server.key).status_code == 404
        port = server.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"temperature": 0.0}, "temperature: got 0.0, expected the run's policy.generation.temperature (0.7)"),
        ({"top_p": 0.9}, "top_p: got 0.9, expected the run's policy.generation.top_p (1.0); leave it out"),
        ({"top_k": 5}, "top_k: got 5, expected the run's policy.generation.top_k (-1); leave it out"),
        ({"n": 2}, "n: got 2, expected one response to a request (1); leave it out"),
        ({"stream": "yes"}, 'stream: got "yes", expected true or false; leave it out'),
        ({"stop": ["x"]}, 'stop: got ["x"], expected none: policy.generation.stop_strings ends responses'),
        ({"seed": 1}, "seed: got 1, expected none: the run draws the seed of each response; leave it out"),
        ({"presence_penalty": 0.5}, "presence_penalty: got 0.5, expected no penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format: got"),
        ({"tool_choice": "required"}, 'tool_choice: got "required", expected auto or none, as training knows'),
        ({"max_tokens": 0}, "max_tokens: got 0, expected a whole number from 1 on"),
        ({"max_token": 5}, "max_token: is no parameter that this endpoint knows; did you mean"),
        ({"model": "another"}, f"model: got \"another\", expected '{MODEL}', the model in training"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "users", "content": "x"}]}, "messages[0].role is 'users', expected"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0]: expected the definition of a tool"),
        ({"tools": [TOOL, TOOL]}, "tools: got 'add' twice, expected one of each"),
    ],
)
def test_t19_what_training_cannot_take_is_refused_in_one_line(more: dict[str, Any], message: str) -> None:
    """T19: no parameter is dropped in silence."""
    with pytest.raises(RequestError) as caught:
        RULES.parse(BODY | more)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.body["error"]["message"] == str(caught.value)


def test_what_changes_nothing_is_accepted() -> None:
    more = {"temperature": 0.7, "top_p": 1, "n": 1, "stream": False, "user": "me", "stop": None, "seed": None}
    limits = {"max_tokens": 7, "max_completion_tokens": 5}
    silent = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    found = RULES.parse(BODY | more | limits | {"messages": [QUESTION, silent, QUESTION]})
    assert found.max_tokens == 5
    assert found.messages[1] == {"role": "assistant", "content": ""}


STOPS = ["Observation:", "Calling tools:"]
OF_CLIENTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"temperature": 0.0, "top_p": 0.9}, ["temperature", "top_p"]),
    ({"tools": [TOOL], "tool_choice": "required", "stop": STOPS}, ["tool_choice", "stop"]),  # smolagents
    (
        {"tools": [TOOL], "parallel_tool_calls": False, "reasoning_effort": "low"},
        ["parallel_tool_calls", "reasoning_effort"],
    ),
    (
        {"response_format": {"type": "json_object"}, "seed": 1, "verbosity": "low"},
        ["response_format", "seed", "verbosity"],
    ),
    ({"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.1}, ["chat_template_kwargs", "min_p"]),
    ({"min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": True, "ignore_eos": False}, []),
    ({"modalities": ["text"], "prediction": {}, "prompt_cache_retention": "24h", "chat_template_kwargs": {}}, []),
]


@pytest.mark.parametrize(("more", "names"), OF_CLIENTS)
def test_what_clients_ask_for_by_default_is_answered_with_the_run_s_sampling(
    more: dict[str, Any], names: list[str]
) -> None:
    found = RequestRules(MODEL, SAMPLING, is_strict=False).parse(BODY | more)
    assert [line.partition(": got ")[0] for line in found.differences] == names
    if names:
        with pytest.raises(RequestError, match=names[0]):
            RULES.parse(BODY | more)
    else:
        assert RULES.parse(BODY | more).differences == ()


@pytest.mark.parametrize("more", [{"n": 2}, {"max_token": 5}, {"top_logprobs": 3}, {"modalities": ["audio"]}])
def test_what_no_reply_can_have_is_refused_by_all_rules(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(more))):
        RequestRules(MODEL, SAMPLING, is_strict=False).parse(BODY | more)


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def session_of(what: str, responses: list[list[int]]) -> Session:
    session = scripted_session(QWEN, [QUESTION], responses, reward=0.5)
    session.prompt = Prompt("p:0", "", session.prompt.token_ids, {"what": what}, messages=(QUESTION,))
    return session


def test_t18_an_agent_that_raises_hangs_or_dies_costs_its_trajectory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T18: an agent that never ends. Nothing of any is left."""
    monkeypatch.setenv("A_SECRET_TOKEN", "x")
    log = tmp_path / "agents.log"
    with EndpointServer(MODEL) as server, AgentWorkers(PROGRAM, 2, log) as workers:
        environment = AgentEnvironment(RequestSettings(RULES, None, 8), server, workers, None)

        async def run(whats: list[str]) -> list[Trajectory]:
            sessions = [session_of(what, [ended(QWEN, "three")]) for what in whats]
            return list(await asyncio.gather(*map(environment.rollout, sessions)))

        async def hang(what: str) -> list[psutil.Process]:
            task = asyncio.create_task(environment.rollout(session_of(what, [ended(QWEN, "three")])))
            while not (started := children()):
                await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return started

        def children() -> list[psutil.Process]:
            return [each for each in psutil.Process().children(recursive=True) if MARK in command_of(each)]

        whats = ["ask", "raise", "exit", "die", "ask", "none", "environment", "array"]
        found = dict(zip(whats, asyncio.run(run(whats)), strict=True))
        assert (found["ask"].reward, found["ask"].fault) == (0.5, None)
        assert (found["raise"].fault, found["raise"].num_turns) == (Fault.ERROR, 1)
        assert found["raise"].fault_message.startswith("ValueError: asked to raise (agents_of_tests.py:")
        assert (found["exit"].fault, found["exit"].fault_message[:10]) == (Fault.ERROR, "SystemExit")
        assert (found["die"].fault, found["die"].fault_message) == (
            Fault.DIED,
            "the process of the agent ended: signal SIGABRT",
        )
        assert found["none"].fault is Fault.ERROR
        assert (found["array"].fault, found["array"].num_turns) == (Fault.DIED, 1)
        assert (found["environment"].reward, found["environment"].fault) == (0.0, None), "it sees no secrets"
        for what in ("hang", "hang_apart"):
            assert psutil.wait_procs(asyncio.run(hang(what)), timeout=60)[1] == []
        # A process that was lost is replaced; one that leaves a child goes on, and the child ends with it.
        assert [each.reward for each in asyncio.run(run(["ask", "child", "ask"]))] == [0.5] * 3
        while len(left := children()) != 1:  # of a process that is starting, the command line is not there at once
            time.sleep(0.05)
    assert psutil.wait_procs(left, timeout=60)[1] == []
    assert not [each for each in psutil.Process().children() if "agents.worker" in command_of(each)]
    assert "the model said three" in log.read_text()


def test_a_command_gets_its_task_and_writes_its_reward(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "from openai import OpenAI\n"
        "task = json.load(sys.stdin)\n"
        "reply = OpenAI().chat.completions.create(model=os.environ['AGENT_MODEL'], messages=task['messages'])\n"
        "if task['record']['what'] == 'exit':\n"
        "    sys.exit(4)\n"
        "if task['record']['what'] == 'reward':\n"
        "    open(os.environ['AGENT_REWARD_FILE'], 'w').write('0.75')\n"
    )
    command = AgentProgram(None, (sys.executable, str(program)), memory_mb=4000)
    with EndpointServer(MODEL) as server, AgentWorkers(command, 1, tmp_path / "agents.log") as workers:
        environment = AgentEnvironment(RequestSettings(RULES, None, 8), server, workers, None)
        found = {
            what: asyncio.run(environment.rollout(session_of(what, [ended(QWEN, "three")])))
            for what in ("reward", "scored", "exit")
        }
    assert {what: each.reward for what, each in found.items()} == {"reward": 0.75, "scored": 0.5, "exit": 0.0}
    assert found["exit"].fault is Fault.ERROR
    assert "ended with exit code 4" in found["exit"].fault_message


def test_an_agent_that_cannot_be_loaded_is_told_with_its_reason(tmp_path: Path) -> None:
    missing = AgentProgram("tests.support.agents_of_tests:agnet", (), memory_mb=4000)
    with pytest.raises(WorkerDiedError) as caught:
        AgentWorkers(missing, 1, tmp_path / "agents.log")
    assert "has no agnet; did you mean agent" in str(caught.value)


def test_a_stranger_s_request_that_is_no_http_is_answered_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    with EndpointServer(MODEL) as server, socket.create_connection(("127.0.0.1", server.port), 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n")
        assert client.recv(12).endswith(b" 400")
    assert capfd.readouterr().err == ""


def test_what_agents_print_is_kept_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MOST_LOG_BYTES", 1000)
    log = tmp_path / "agents.log"
    with AgentWorkers(PROGRAM, 1, log), log.open("ab") as file:
        file.write(b"x" * 5000)
    assert log.read_bytes() == b"[5,000 bytes of earlier output have been removed]\n"

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""OpenEnv environments on servers of their own: episodes, rewards, and servers that fail, hang or end."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.libraries.openenv_environment import OpenEnvRollout
from nemo_rl_moe.rollouts.libraries.openenv_servers import OpenEnvServer
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.conversations import ALL, scripted_session
from tests.support.grpo_inputs import only_sequence, openenv_section, sampled_ids

QWEN = ALL["Qwen2.5, Qwen2-MoE"]
APP = "tests.support.openenv_app:app"
LIMIT_S = 120.0
WITHOUT = "without openenv-core: make test-libraries"


@pytest.fixture(scope="module")
def server() -> Iterator[OpenEnvServer]:
    pytest.importorskip("openenv", reason=WITHOUT)
    running = OpenEnvServer(APP)
    running.start()
    running.wait()
    yield running
    running.stop()


def driver(**keys: Any) -> OpenEnvConfig:
    defaults = {"server": APP, "sessions_per_server": 2, "action_key": "text", "observation_key": "said"}
    own = {"step_timeout_s": LIMIT_S, "max_turns": 4, "answer_after": "</think>"}
    return openenv_section(**defaults | own | keys)


def session_of(*responses: str) -> Session:
    session = scripted_session(
        QWEN,
        [{"role": "user", "content": "Play."}],
        [[*QWEN.encode(each), QWEN.end_ids[-1]] for each in responses],
    )
    session.prompt = replace(session.prompt, record={"reset": {"number": 5}})
    return session


def play(server: OpenEnvServer, *responses: str, config: OpenEnvConfig | None = None) -> Trajectory:
    rollout = RolloutFunction(OpenEnvRollout([server], config or driver(), score_truncated=False), "openenv")
    return asyncio.run(rollout.rollout(session_of(*responses)))


def outcomes(found: Trajectory) -> list[str]:
    return [call.outcome for turn in found.conversation for call in turn.calls]


def test_responses_are_actions_until_the_episode_is_done(server: OpenEnvServer) -> None:
    found = play(server, "2", "<think>hm</think> 6", "5", "never said")
    assert (found.reward, found.is_correct, found.num_turns, found.fault) == (0.5, True, 3, None)
    assert (found.metrics["openenv/steps"], found.metrics["openenv/failed_steps"]) == (3, 0)
    calls = [call for turn in found.conversation for call in turn.calls]
    assert [(call.name, call.arguments, call.outcome) for call in calls] == [
        ("step", json.dumps({"text": text}), "ok") for text in ("2", "6", "5")
    ]
    text = QWEN.tokenizer.decode(only_sequence(found).token_ids)
    assert text.index("Play.\n\nGuess a number below 8.") < text.index("larger") < text.index("smaller")
    ended = [[*QWEN.encode(each), QWEN.end_ids[-1]] for each in ("2", "<think>hm</think> 6", "5")]
    assert sampled_ids(found) == [token for ids in ended for token in ids]


def test_turns_are_limited(server: OpenEnvServer) -> None:
    found = play(server, "2", "2", "2", config=driver(max_turns=2))
    assert (found.reward, found.num_turns, found.is_correct) == (-0.5, 2, False)


def test_more_trajectories_than_places_wait_for_one(server: OpenEnvServer) -> None:
    rollout = OpenEnvRollout([server], driver(), score_truncated=False)

    async def run() -> list[Trajectory]:
        rounds = [await asyncio.gather(*(rollout(session_of("1", "5")) for _ in range(7))) for _ in range(2)]
        return [found for each in rounds for found in each]

    assert [found.reward for found in asyncio.run(run())] == [0.75] * 14


def test_what_the_server_refuses_costs_the_trajectory(server: OpenEnvServer) -> None:
    found = play(server, "two")
    assert found.fault == Fault.ERROR
    assert "no number" in found.fault_message
    assert outcomes(found) == ["error"]
    assert (found.metrics["openenv/steps"], found.metrics["openenv/failed_steps"]) == (0, 1)
    found = play(server, "2", config=driver(observation_key="text"))
    assert found.fault_message.startswith("ValueError: env.driver.observation_key: got 'text', but an observation has")


@pytest.mark.parametrize(
    ("response", "fault", "outcome"), [("hang", Fault.TIMEOUT, "timeout"), ("end", Fault.ERROR, "died")]
)
def test_a_server_that_hangs_or_ends_costs_the_trajectory_alone(
    server: OpenEnvServer, response: str, fault: Fault, outcome: str
) -> None:
    found = play(server, response, config=driver(step_timeout_s=3.0))
    assert found.fault == fault
    assert outcomes(found) == [outcome]
    assert play(server, "5").reward == 1.0


def test_a_server_that_answers_nobody_is_replaced(server: OpenEnvServer) -> None:
    assert server._process is not None
    first = psutil.Process(server._process.pid)
    first.send_signal(signal.SIGSTOP)
    assert play(server, "5", config=driver(step_timeout_s=1.0)).fault is not None
    assert play(server, "5").reward == 1.0
    assert not first.is_running()


def test_it_listens_on_the_loopback_interface_alone(server: OpenEnvServer) -> None:
    assert server._process is not None
    sockets = psutil.Process(server._process.pid).net_connections("inet")
    assert {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_a_server_ends_with_the_process_that_started_it() -> None:
    pytest.importorskip("openenv", reason=WITHOUT)
    code = (
        "from nemo_rl_moe.rollouts.libraries.openenv_servers import OpenEnvServer\n"
        f"server = OpenEnvServer({APP!r})\n"
        "server.start(); server.wait(); print(server._process.pid, flush=True)\n"
        "import time; time.sleep(3600)\n"
    )
    parent = psutil.Popen([sys.executable, "-c", code], stdout=-1, text=True, cwd=Path(__file__).parents[3])
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    psutil.wait_procs([process], timeout=LIMIT_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("app", "words"), [("no_such_module:app", "no_such_module"), ("json:app", "app")])
def test_an_app_that_does_not_start_is_told_before_a_run(app: str, words: str) -> None:
    pytest.importorskip("uvicorn")
    server = OpenEnvServer(app)
    server.start()
    with pytest.raises(ConfigurationError, match=f"env.driver.server: {app} does not start .*said last: .*{words}"):
        server.wait()

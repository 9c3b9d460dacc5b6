# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasksets of verifiers.v1: their prompts, conversations, tools, rewards and errors, in real processes of agents."""

import asyncio
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl_moe.config.schema_grpo import PromptSourceConfig
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.template_inputs import NO_INPUTS
from nemo_rl_moe.endpoint.chat_requests import RequestRules
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.agents.environment import AgentEnvironment
from nemo_rl_moe.rollouts.agents.requests import RequestSettings
from nemo_rl_moe.rollouts.agents.server import EndpointServer
from nemo_rl_moe.rollouts.agents.worker_pool import AgentWorkers
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.libraries.verifiers_v1 import TasksetProgram, check_taskset, taskset_prompts
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.tools.detection import format_of
from tests.support.conversations import ALL, MODEL, scripted_session
from tests.support.grpo_inputs import sampled_ids, verifiers_v1_section


def _is_installed() -> bool:
    try:
        return importlib.metadata.version("verifiers").startswith("0.4")
    except importlib.metadata.PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not _is_installed(), reason="without verifiers 0.4: make test-libraries")

QWEN = ALL["Qwen2.5, Qwen2-MoE"]
MODULES = Path(__file__).parents[2] / "support/verifiers_modules"
CALL = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
RULES = RequestRules(MODEL, SamplingParameters(100), is_strict=True)


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODULES))


def source(split: str = "train", num_items: int | None = None) -> PromptSourceConfig:
    return PromptSourceConfig(path=None, split=split, num_items=num_items, seed=0)


def prompts(split: str = "train", num_items: int | None = None, **keys: Any) -> list[PromptRecord]:
    lines = list(taskset_prompts(verifiers_v1_section("sums-v1", **keys), source(split, num_items)).lines)
    return [line for line in lines if isinstance(line, PromptRecord)]


def session_of(record: PromptRecord, responses: Sequence[str], max_tokens: int) -> Session:
    session = scripted_session(
        QWEN,
        record.messages,
        [[*QWEN.encode(each), QWEN.end_ids[-1]] for each in responses],
        continuation=Continuation(QWEN.tokenizer),
        max_tokens=max_tokens,
    )
    session.prompt = replace(session.prompt, record=record.record, messages=record.messages)
    return session


def play(
    folder: Path,
    *episodes: Sequence[str],
    max_turns: int = 4,
    max_tokens: int = 10_000,
    score_truncated: bool = True,
    **keys: Any,
) -> list[Trajectory]:
    """Return the trajectories of the first prompts, whose responses are given."""
    driver = verifiers_v1_section("sums-v1", max_turns=max_turns, **keys)
    records = prompts(**keys)
    tool_format = format_of(QWEN.tokenizer, None, NO_INPUTS)
    sessions = [session_of(record, responses, max_tokens) for record, responses in zip(records, episodes, strict=False)]
    program = TasksetProgram(driver, score_truncated)
    with EndpointServer(MODEL) as server, AgentWorkers(program, 2, folder / "agents.log") as workers:
        environment = AgentEnvironment(RequestSettings(RULES, tool_format, max_turns), server, workers, None)

        async def all_of_them() -> list[Trajectory]:
            return list(await asyncio.gather(*map(environment.rollout, sessions)))

        return asyncio.run(all_of_them())


def texts(found: Trajectory) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in found.conversation]


def test_an_episode_is_scored_by_the_taskset_and_its_responses_are_trained_on(tmp_path: Path) -> None:
    found = play(tmp_path, ["7"], ["x1"], ["no"])
    assert [each.fault_message for each in found] == ["", "", ""]
    assert [(each.reward, each.is_correct) for each in found] == [(2.0, True), (1.0, True), (0.0, False)]
    assert all((each.num_turns, each.num_sequences) == (1, 1) for each in found)
    assert texts(found[0])[:2] == [("system", "Add."), ("user", "3+4=?")]
    assert [each.metrics["verifiers/digits"] for each in found] == [1.0, 0.5, 0.0], "unweighted"
    assert sampled_ids(found[0]) == [*QWEN.encode("7"), QWEN.end_ids[-1]]


def test_a_tool_of_the_taskset_is_called_and_another_turn_is_asked_for(tmp_path: Path) -> None:
    with_tool = {"task": {"with_tool": True}}
    [found] = play(tmp_path, [CALL, "7"], taskset=with_tool)
    assert found.fault_message == ""
    assert (found.reward, found.num_turns, found.metrics["agent/tool_calls"]) == (2.0, 2, 1)
    assert texts(found)[-2:] == [("tool", "7"), ("assistant", "7")]
    [found] = play(tmp_path, [CALL, "7"], taskset=with_tool, max_turns=1)
    assert (found.fault_message, found.num_turns, found.reward) == ("", 1, 0.0), "the library ends it and scores"


def test_an_environment_of_the_taskset_asks_again(tmp_path: Path) -> None:
    [found] = play(tmp_path, ["7", "yes7"], taskset={"asks_again": True})
    assert found.fault_message == ""
    assert (found.reward, found.num_turns, found.num_sequences) == (2 * 2 / 5, 2, 1)
    assert texts(found)[-2:] == [("user", "Are you sure?"), ("assistant", "yes7")]


def test_a_failed_episode_costs_its_trajectory_alone(tmp_path: Path) -> None:
    found = play(tmp_path, ["7"], ["15"], taskset={"wants": "raises"})
    assert [each.fault for each in found] == [Fault.ERROR, None]
    assert "TaskError: " in found[0].fault_message
    assert "no score for seven" in found[0].fault_message
    assert found[1].reward == 2.0


@pytest.mark.parametrize(("score_truncated", "reward"), [(True, 2.0), (False, 0.0)])
def test_a_conversation_that_gets_too_long_ends(score_truncated: bool, reward: float, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_tokens": 60, "taskset": {"asks_again": True}}
    [found] = play(tmp_path, ["7"], score_truncated=score_truncated, **keys)
    assert (found.fault_message, found.num_turns, found.reward) == ("", 1, reward)


def test_what_a_hanging_episode_has_started_ends_with_it(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"taskset": {"wants": "hangs"}}
    session = session_of(prompts(**keys)[0], ["7"], 10_000)
    program = TasksetProgram(verifiers_v1_section("sums-v1", **keys), score_truncated=True)
    with EndpointServer(MODEL) as server, AgentWorkers(program, 1, tmp_path / "agents.log") as workers:
        environment = AgentEnvironment(RequestSettings(RULES, None, 4), server, workers, None)

        def started() -> list[psutil.Process]:
            family = psutil.Process().children(recursive=True)
            return family if any(each.name() == "sleep" for each in family) else []

        async def hang() -> list[psutil.Process]:
            task = asyncio.create_task(environment.rollout(session))
            while not (family := started()) and not task.done():
                await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return family

        family = asyncio.run(hang())
        assert [each for each in family if each.name() == "sleep"]
        assert psutil.wait_procs(family, timeout=60)[1] == []


def test_tasks_to_validate_with_are_of_other_settings_or_held_out() -> None:
    assert [record.sample_id for record in prompts()] == [f"sums-v1[train]:{index}" for index in range(6)]
    tested = prompts("test", validation={"split": "test"})
    assert [(record.sample_id, record.record["answer"]) for record in tested] == [
        ("sums-v1[eval]:0", "42"),
        ("sums-v1[eval]:1", "11"),
    ]
    assert [record.record["row"]["example_id"] for record in prompts(validation=2)] == [0, 1, 2, 3]
    assert [record.record["row"]["example_id"] for record in prompts("test", validation=2)] == [4, 5]
    some = [record.sample_id for record in prompts(num_items=3)]
    assert len(set(some)) == 3
    assert some == [record.sample_id for record in prompts(num_items=3)]
    with pytest.raises(ConfigurationError, match="validation: got 6, expected less than 6, the number of tasks of sum"):
        prompts(validation=6)


@pytest.mark.parametrize(
    ("name", "keys", "messages"),
    [
        ("sums-v2", {}, ["id: got 'sums-v2', but there is no module sums_v2, neither installed"]),
        (
            "sums-env",
            {},
            ["id: sums-env cannot be imported: AttributeError: module 'verifiers' has no"],
        ),
        (
            "sums-v1",
            {
                "taskset": {"splt": "train", "wants": 3},
                "validation": {"split": "tst"},
                "agent": {"harness": {"id": "nul"}},
            },
            [
                "taskset.splt: got 'train' (str): Extra inputs are not permitted; did you mean split?",
                "taskset.wants: got 3 (int): Input should be a valid string",
                "validation.split: got 'tst' (str): Input should be 'train' or 'test'",
                "agent: ModuleNotFoundError: harness 'nul' not found",
            ],
        ),
        (
            "sums-v1",
            {"agent": {"harness": {"id": "mini-swe-agent"}}},
            ["agent: Harness 'mini-swe-agent' needs a container runtime"],
        ),
    ],
)
def test_a_taskset_that_cannot_be_played_is_refused(name: str, keys: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_taskset(verifiers_v1_section(name, **keys))
    found = sorted(caught.value.problems)
    assert len(found) == len(messages), found
    for problem, message in zip(found, sorted(messages), strict=True):
        assert problem.startswith(f"env.driver.{message}")
        assert "\n" not in problem

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of the verifiers library: their prompts, conversations, tools, rewards and errors."""

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.schema_grpo import PromptSourceConfig
from nemo_rl_moe.data.continuation import Continuation
from nemo_rl_moe.data.template_inputs import NO_INPUTS
from nemo_rl_moe.data.verifiers_prompts import verifiers_prompts
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards import verifiers_library
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.libraries.verifiers_environment import VerifiersRollout
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.tools.detection import format_of
from tests.support.conversations import ALL, scripted_session
from tests.support.grpo_inputs import only_sequence, sampled_ids, verifiers_section

pytest.importorskip("verifiers", reason="without verifiers: make test-libraries")

QWEN = ALL["Qwen2.5, Qwen2-MoE"]
MODULES = Path(__file__).parents[2] / "support/verifiers_modules"


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODULES))


def source(split: str = "train", num_items: int | None = None) -> PromptSourceConfig:
    return PromptSourceConfig(path=None, split=split, num_items=num_items, seed=0)


def play(arguments: dict[str, Any], *responses: str, max_tokens: int = 10_000) -> tuple[Session, Trajectory]:
    """Return the session and the trajectory of the first prompt, and of responses that are given."""
    config = verifiers_section("sums-env", **arguments)
    records = list(verifiers_prompts(config, source()).lines)
    record = min(records, key=lambda each: each.sample_id)
    answer = record.record["answer"]
    session = scripted_session(
        QWEN,
        record.messages,
        [[*QWEN.encode(each.replace("ANSWER", answer)), QWEN.end_ids[-1]] for each in responses],
        inputs=record.inputs,
        continuation=Continuation(QWEN.tokenizer),
        max_tokens=max_tokens,
    )
    session.prompt = replace(session.prompt, record=record.record)
    tool_format = format_of(QWEN.tokenizer, None, NO_INPUTS) if record.inputs.tools else None
    environment = verifiers_library.load_verifiers(config)
    rollout = VerifiersRollout(environment, tool_format, score_truncated=False)
    return session, asyncio.run(RolloutFunction(rollout, "verifiers sums-env").rollout(session))


def called(**arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"


def test_its_data_are_prompts_to_train_on_and_others_to_validate_with() -> None:
    config = verifiers_section("sums-env")
    training, held_out = (list(verifiers_prompts(config, source(split)).lines) for split in ("train", "test"))
    assert (len(training), len(held_out)) == (6, 2)
    assert {each.messages[0]["content"] for each in training} == {"Add."}
    assert sorted(each.record["answer"] for each in held_out) == ["11", "42"]
    assert len(list(verifiers_prompts(config, source(num_items=3)).lines)) == 3


@pytest.mark.parametrize(("response", "reward"), [("It is ANSWER", 1.0), ("I do not know", 0.0)])
def test_one_turn_is_scored_by_its_rubric(response: str, reward: float) -> None:
    _, found = play({}, response)
    assert (found.reward, found.is_correct, found.fault) == (reward, reward == 1.0, None)
    assert found.metrics["verifiers/right"] == reward
    assert found.metrics["verifiers/num_turns"] == 1


def test_its_tools_are_called_and_what_is_trained_on_is_what_was_sampled() -> None:
    session, found = play({"kind": "tool"}, called(a=40, b=2), called(a=1), "So ANSWER")
    assert (found.reward, found.num_turns, found.num_sequences, found.fault) == (1.0, 3, 1, None)
    assert found.metrics["verifiers/add_calls"] == 2
    results = [message["content"] for message in session.messages if message["role"] == "tool"]
    assert results[0] == "42"
    assert "missing 1 required positional argument" in results[1]
    text = QWEN.tokenizer.decode(only_sequence(found).token_ids)
    assert "Add two numbers" in text  # the definition is in the prompt
    calls = [call for turn in found.conversation for call in turn.calls]
    assert [(call.name, call.outcome) for call in calls] == [("add", "answered"), ("add", "error")]
    counts = [found.metrics[f"tools/{name}"] for name in ("calls", "wrong_calls", "failed_calls", "unknown_calls")]
    assert counts == [2, 0, 1, 0]
    ends = [turn.token_ids for turn in session.turns]
    assert sampled_ids(found) == [token for ids in ends for token in ids]


def test_calls_have_outcomes_whatever_follows() -> None:
    """Behind the last response there may be results, for which no further one is asked; and what is no call."""
    _, found = play({"kind": "tool", "max_turns": 1}, called(a=40, b=2))
    outcomes = [call.outcome for turn in found.conversation for call in turn.calls]
    assert (outcomes, found.metrics["tools/unknown_calls"]) in ((["answered"], 0.0), (["unknown"], 1.0))
    _, found = play({"kind": "tool"}, "<tool_call>{add</tool_call>")
    assert [call.outcome for turn in found.conversation for call in turn.calls] == ["wrong"]
    assert found.metrics["tools/wrong_calls"] == 1


def test_a_history_that_it_rewrites_is_another_sequence_and_its_errors_cost_the_trajectory() -> None:
    _, found = play({"kind": "again"}, "ANSWER", "Yes.", "ANSWER")
    assert (found.num_turns, found.num_sequences, found.fault, found.reward) == (3, 2, None, 1.0)
    _, found = play({"kind": "again", "max_turns": 9}, "ANSWER", "Yes.", "ANSWER", "never said")
    assert found.fault == Fault.ERROR
    assert "the server is gone" in found.fault_message


def test_a_reward_function_that_raises_counts_as_the_library_counts_it() -> None:
    _, found = play({"reward": "fails"}, "ANSWER")
    assert found.reward == 0.0


def test_what_does_not_fit_ends_as_one_that_was_cut() -> None:
    session, _ = play({"kind": "tool"}, called(a=40, b=2), "ANSWER")
    prompt = len(session.prompt.token_ids)
    _, found = play(
        {"kind": "tool"}, called(a=40, b=2), "ANSWER", max_tokens=prompt + len(session.turns[0].token_ids) + 3
    )
    assert (found.finish_reason, found.num_turns, found.reward, found.fault) == ("length", 1, 0.0, None)


def test_the_runs_signals_are_still_its_own() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    verifiers_library._loaded.cache_clear()
    verifiers_library.load_verifiers(verifiers_section("sums-env"))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "sums_envv",
            {},
            r"env.driver.id: got 'sums_envv', but there is no module sums_envv.*there are:.*sums_env",
        ),
        ("json", {}, "the module json has no function load_environment"),
        ("sums-env", {"reward": "none"}, r"sums-env cannot be made with reward: ValueError: no reward none"),
        ("sums-env", {"colour": 1}, "sums-env cannot be made with colour: TypeError"),
        ("sums-env", {"reward": "compares"}, "scores the responses to a prompt together"),
    ],
)
def test_environments_that_cannot_be_made(
    name: str, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MODULES)
    with pytest.raises(ConfigurationError, match=message) as error:
        verifiers_library.load_verifiers(verifiers_section(name, **arguments))
    assert "\n" not in str(error.value)

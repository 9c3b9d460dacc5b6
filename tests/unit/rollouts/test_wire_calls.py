# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls that a program makes: their outcomes by what comes back, which is never taken for a success."""

from typing import Any

import pytest

from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.wire_calls import outcome_of_result
from nemo_rl_moe.runs.folder.conversations import conversation_json, conversation_of, covered
from tests.support.conversations import ALL, MODEL, client_of, ended, play

QWEN = ALL["Qwen3, Qwen3-MoE"]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CANNOT_BE_READ = '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("42", "answered"),
        ("", "answered"),
        ("Errors of measurement: a survey", "answered"),
        ("no error: all is well", "answered"),
        ('{"error": null, "sum": 42}', "answered"),
        ("{not JSON", "answered"),
        ("error: division by zero", "error"),
        ("Error executing tool add: 1 validation error", "error"),
        ("ZeroDivisionError: division by zero", "error"),
        ("requests.exceptions.HTTPError: 404", "error"),
        ("Traceback (most recent call last):\n  File", "error"),
        ("An error occurred while running the tool.", "error"),
        ('{"error": "no such file"}', "error"),
        ('{"is_error": true, "content": "x"}', "error"),
    ],
)
def test_a_result_says_that_its_call_has_failed_or_does_not_say(text: str, outcome: str) -> None:
    assert outcome_of_result(text) == outcome


def played(results: list[str], responses: list[str], max_turns: int = 20) -> Trajectory:
    """Return the trajectory of an agent that answers calls by results, in their order, until there are no more."""

    def agent(task: AgentTask) -> float:
        client, messages, left = client_of(task), [*task.messages], list(results)
        while True:
            reply: Any = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
            answer = reply.choices[0].message
            messages.append(answer.to_dict())
            calls = answer.tool_calls or []
            if not calls or len(left) < len(calls):
                return 0.5
            messages += [{"role": "tool", "tool_call_id": call.id, "content": left.pop(0)} for call in calls]

    return play(agent, [ended(QWEN, each) for each in responses], QWEN, max_turns=max_turns)[1]


def outcomes(found: Trajectory) -> list[list[str]]:
    return [[call.outcome for call in turn.calls] for turn in found.conversation if turn.is_sampled]


def counts(found: Trajectory) -> list[float]:
    names = ("tool_calls", "malformed_calls", "failed_calls", "unknown_calls")
    return [found.metrics[f"agent/{name}"] for name in names]


def test_calls_of_an_agent_have_outcomes() -> None:
    found = played(["2", "error: no"], [f"{CALL}\n{CALL}", CALL, "2"])
    assert outcomes(found) == [["answered", "error"], ["unknown"]]
    assert counts(found) == [3, 0, 1, 1]
    first = next(turn for turn in found.conversation if turn.calls)
    assert [(call.call_id, call.name, call.arguments) for call in first.calls] == [
        ("call00000", "add", '{"a": 1}'),
        ("call00001", "add", '{"a": 1}'),
    ]
    assert conversation_of(conversation_json(found.conversation)) == list(found.conversation)
    assert found.times is not None
    assert len(found.times.tools) == 3, "one a call, as the report pairs them"
    assert covered(found.times.tools) <= found.times.seconds


def test_a_call_that_cannot_be_read_is_wrong() -> None:
    found = played([], [CANNOT_BE_READ])
    assert (outcomes(found), counts(found)) == ([["wrong"]], [0, 1, 0, 0])


def test_a_result_counts_although_its_request_is_refused() -> None:
    found = played(["error: no"], [CALL], max_turns=1)
    assert found.fault is None
    assert (outcomes(found), counts(found)) == ([["error"]], [1, 0, 1, 0])


def test_a_result_that_is_sent_again_counts_once() -> None:
    found = played(["error: no", "2"], [CALL, CALL, "2"])
    assert (outcomes(found), counts(found)) == ([["error"], ["answered"], []], [2, 0, 1, 0])

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose model calls tools, some of which never return."""

import math
import signal
from pathlib import Path

import pytest

from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.functional import grpo_runs, run_kills, sft_runs

pytestmark = pytest.mark.shared_ray
START_LIMIT_S, END_LIMIT_S = 240.0, 120.0
CHILD = "started-by-a-tool"


def read_calls(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Return three calls for any text: an untrained model writes none. One text in four has a tool that hangs."""
    second = ToolCall("block", {"seconds": 10_000.0}) if len(text.encode()) % 4 == 0 else ToolCall("add", {"a": "x"})
    return [ToolCall("add", {"a": 40, "b": 2}), ToolCall("count", {}), second]


HANGING = ToolFormat(
    lambda text, schemas: [ToolCall("start_child", {"option": CHILD}), ToolCall("block", {"seconds": 10_000.0})],
    TOOL_FORMATS["hermes"].example,
)
ANY_TEXT = ToolFormat(read_calls, TOOL_FORMATS["hermes"].example)


def test_a_run_goes_on_whatever_tools_do(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    tools = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 2000,
        "policy__generation__max_new_tokens": 16,
        "policy__generation__stop_token_ids": list(range(0, 250, 8)),
        "env__driver__kind": "tools",
        "env__driver__tools": [
            "tests.support.tool_functions:add",
            "tests.support.tool_functions:block",
            "tests.support.tool_types:Counter.count",
        ],
        "env__driver__parameters": {"Counter": {"first": 6}},
        "env__driver__format": "tests.functional.test_tool_run:ANY_TEXT",
        "env__driver__limits__num_workers": 2,
        "env__driver__limits__call_timeout_s": 1.0,
        "env__driver__max_turns": 2,
        "env__reward__kind": "callable",
        "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
        "env__score_truncated": True,
        "grpo__max_num_steps": 2,
        # Each tool that hangs costs the start of a process.
        "grpo__num_generations_per_prompt": 2,
        "policy__train_global_batch_size": 8,
        "data__validation": None,
    }
    grpo_runs.run_here(grpo_runs.settings(tmp_path, data, **tools, **sft_runs.only_jsonl()), tmp_path)
    steps, samples = sft_runs.outcome_of(tmp_path)
    assert len(steps) == 2
    called = [sample for sample in samples if sample.get("num_turns") == 2]
    assert called
    for sample in called:
        assert "<tool_response>42</tool_response>" in sample["response"]
        assert "<tool_response>7</tool_response>" in sample["response"], "each trajectory has its own counter"
        assert ("expected integer" in sample["response"]) != ("no result within 1 s" in sample["response"])
        calls = [call for turn in sample["conversation"] for call in turn.get("calls", [])]
        assert {call["outcome"] for call in calls} in ({"ok", "wrong"}, {"ok", "timeout"})
        assert any(turn["trained"] for turn in sample["conversation"]) == ("left_out" not in sample)
        assert len(sample["times"]["tools"]) == len(calls)
    assert any("no result within 1 s" in sample["response"] for sample in called)
    # An untrained model may end a turn with a token behind which its template cannot go on.
    faults = [sample["fault"] for sample in samples if sample.get("fault")]
    assert all("the turn ends with" in fault for fault in faults)
    assert len(faults) < len(samples) / 4
    for metrics in steps:
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/tools/calls"] > 0
        # Training sees the tokens of all turns as generation saw them, with results in between.
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_is_ended_while_tools_run(number: signal.Signals, tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    tools = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 2000,
        "env__driver__kind": "tools",
        "env__driver__tools": ["tests.support.tool_functions:start_child", "tests.support.tool_functions:block"],
        "env__driver__format": "tests.functional.test_tool_run:HANGING",
        "env__driver__limits__num_workers": 2,
        "env__driver__limits__call_timeout_s": 10_000.0,
        "env__driver__limits__turn_timeout_s": 20_000.0,
        "policy__generation__max_new_tokens": 16,
        "policy__generation__stop_token_ids": list(range(0, 250, 8)),
        "env__score_truncated": True,
        "data__validation": None,
    }
    settings = grpo_runs.settings(tmp_path, data, **tools, **sft_runs.only_jsonl())
    with run_kills.running(grpo_runs.command(settings), tmp_path) as run:
        run.wait_for_text("rollouts: no progress for ", START_LIMIT_S)
        children = [process for process in run.family() if CHILD in process.cmdline()]
        assert children
        ports = run.ports()
        run.process.send_signal(number)
        run.wait_for_end(END_LIMIT_S)
        run.wait_until_nothing_runs(END_LIMIT_S)
    assert not sft_runs.running(children)
    assert not run_kills.ports_in_use(ports)

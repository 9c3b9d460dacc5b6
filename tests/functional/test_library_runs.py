# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs with environments and tools of other libraries."""

import importlib.util
import json
import math
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.make_quiz_data import main as make_quiz_data
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.functional import grpo_runs, run_kills, sft_runs, shared_ray

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]
SUPPORT = Path(__file__).parents[1] / "support"
ENVIRONMENTS = sft_runs.REPOSITORY_ROOT / "examples/environments"
WITHOUT = "make test-libraries"


def read_calls(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Return a call for any text: an untrained model writes none."""
    return [ToolCall("look_up", {"word": "chat"})]


ANY_TEXT = ToolFormat(read_calls, TOOL_FORMATS["hermes"].example)
CHILD = "started-by-a-server"
HANGING = ToolFormat(lambda text, schemas: [ToolCall("start_child", {"option": CHILD})], TOOL_FORMATS["hermes"].example)
CALCULATING = ToolFormat(
    lambda text, schemas: [
        ToolCall("calculator", {"expression": "40+2"}),
        ToolCall("calculator", {"expression": "4/2"}),
    ],
    TOOL_FORMATS["hermes"].example,
)
START_LIMIT_S, END_LIMIT_S = 400.0, 200.0


def trained(name: str, folder: Path, overrides: Sequence[str]) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Return the metrics of the steps of a run of a shipped configuration, and its samples."""
    exemplar = grpo_runs.EXEMPLAR.with_name(name)
    shared_ray.run_here(["grpo", "--config", str(exemplar), *overrides], folder)
    return sft_runs.outcome_of(folder)


def outcomes(samples: Sequence[Mapping[str, Any]]) -> Counter[str]:
    return Counter(
        call["outcome"]
        for sample in samples
        for turn in sample.get("conversation", ())
        for call in turn.get("calls", ())
    )


def test_an_environment_of_verifiers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason=WITHOUT)
    monkeypatch.syspath_prepend(str(SUPPORT / "verifiers_modules"))
    changes = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 500,
        "env__driver__kind": "verifiers",
        "env__driver__id": "sums-env",
        "env__driver__arguments": {"reward": "digits"},
        "env__reward": None,
        "env__score_truncated": True,
        "data__train__path": None,
        "data__validation__path": None,
        "grpo__max_num_epochs": 2,  # six prompts, four a step
        "grpo__val_num_generations": 1,
    }
    overrides = grpo_runs.settings(tmp_path, tmp_path, **changes, **sft_runs.only_jsonl())
    grpo_runs.run_here(overrides, tmp_path)
    run_folder = sft_runs.only_run_folder(tmp_path)
    records = list(read_metrics(run_folder / METRICS_FILE_NAME))
    steps = [record.metrics for record in records if "train/loss" in record.metrics]
    assert len(steps) == 2
    for metrics in steps:
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/verifiers/num_turns"] == 1
        assert metrics["train/verifiers/digits"] == pytest.approx(metrics["train/reward"])
        # Training sees the tokens as generation saw them.
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
    assert any("val/verifiers/digits" in record.metrics for record in records)


def test_tools_of_an_mcp_server_are_called(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason=WITHOUT)
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    server = {"command": sys.executable, "args": [str(SUPPORT / "mcp_server.py")]}
    changes = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 4000,
        "policy__generation__max_new_tokens": 16,
        "policy__generation__stop_token_ids": list(range(0, 250, 8)),
        "env__driver__kind": "tools",
        "env__driver__tools": ["calculator"],
        "env__driver__mcp_servers": {"words": server},
        "env__driver__format": "tests.functional.test_library_runs:ANY_TEXT",
        "env__driver__limits__num_workers": 1,
        "env__driver__limits__call_timeout_s": 60.0,
        "env__driver__max_turns": 2,
        "env__reward__kind": "callable",
        "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
        "env__score_truncated": True,
        "grpo__max_num_steps": 1,
        "data__validation": None,
    }
    grpo_runs.run_here(grpo_runs.settings(tmp_path, data, **changes, **sft_runs.only_jsonl()), tmp_path)
    run_folder = sft_runs.only_run_folder(tmp_path)
    samples = sft_runs.samples_of(run_folder)
    called = [sample for sample in samples if sample.get("num_turns") == 2]
    assert called
    assert all("<tool_response>chat x 3</tool_response>" in sample["response"] for sample in called)


def test_nothing_is_left_of_servers_whose_run_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason=WITHOUT)
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    changes = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 4000,
        "policy__generation__max_new_tokens": 16,
        "policy__generation__stop_token_ids": list(range(0, 250, 8)),
        "env__driver__kind": "tools",
        "env__driver__mcp_servers": {"words": {"command": sys.executable, "args": [str(SUPPORT / "mcp_server.py")]}},
        "env__driver__format": "tests.functional.test_library_runs:HANGING",
        "env__driver__limits__call_timeout_s": 10_000.0,
        "env__driver__limits__turn_timeout_s": 20_000.0,
        "env__score_truncated": True,
        "data__validation": None,
    }
    overrides = grpo_runs.settings(tmp_path, data, **changes, **sft_runs.only_jsonl())
    with run_kills.running(grpo_runs.command(overrides), tmp_path / "work") as run:
        run.wait_for_text("rollouts: no progress for ", START_LIMIT_S)
        left = [each for each in run.family() if {CHILD, str(SUPPORT / "mcp_server.py")} & {*each.cmdline()}]
        assert len(left) >= 2, "servers and their children"
        run.process.send_signal(signal.SIGKILL)
        run.wait_for_end(END_LIMIT_S)
        run.wait_until_nothing_runs(END_LIMIT_S)
    assert not sft_runs.running(left)


def test_the_calculator_of_the_shipped_server_is_called(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason=WITHOUT)
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    server = {"command": sys.executable, "args": [str(ENVIRONMENTS / "calculator_server.py")]}
    overrides = grpo_runs.settings(
        tmp_path,
        data,
        policy__model_name=sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_calculator",
        policy__max_total_sequence_length=300,
        policy__generation__stop_token_ids=list(range(0, 250, 8)),
        env__driver__mcp_servers={"calculator": server},
        env__driver__format="tests.functional.test_library_runs:CALCULATING",
        env__driver__limits__max_result_characters=400,
        env__driver__max_turns=2,
        grpo__max_num_steps=1,
        data__validation=None,
        **sft_runs.only_jsonl(),
    )
    steps, samples = trained("grpo_tiny_moe_mcp.yaml", tmp_path, overrides)
    found = outcomes(samples)
    assert set(found) == {"ok", "error"}
    assert found["ok"] == found["error"] > 0
    assert any(turn["text"] == "42" for sample in samples for turn in sample.get("conversation", ()))
    assert steps[0]["train/tools/failed_calls"] * 2 == steps[0]["train/tools/calls"]


def test_the_quiz_of_the_shipped_server_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openenv", reason=WITHOUT)
    monkeypatch.setenv("PYTHONPATH", str(sft_runs.REPOSITORY_ROOT))  # for the process of the server
    data = grpo_runs.make_prompts(tmp_path / "additions", 12)
    assert make_quiz_data(["--data", str(data), "--output", str(tmp_path / "quiz")]) == 0
    overrides = grpo_runs.settings(
        tmp_path,
        tmp_path / "quiz",
        env__score_truncated=True,
        grpo__max_num_steps=2,
        **sft_runs.only_jsonl(),
    )
    steps, samples = trained("grpo_tiny_moe_openenv.yaml", tmp_path, overrides)
    assert set(outcomes(samples)) == {"ok"}
    for metrics in steps:
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/openenv/steps"] == metrics["train/mean_turns_per_sample"] == 2
        assert metrics["train/openenv/failed_steps"] == 0
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
    questions = [json.loads(line)["reset"]["questions"] for line in (tmp_path / "quiz/grpo.jsonl").open()]
    asked = [(sample["prompt"], sample["conversation"][2]["text"]) for sample in samples if sample["split"] == "train"]
    assert set(asked) <= {(first, second) for first, second in questions}


@pytest.mark.parametrize(
    ("name", "extra"),
    [("mcp", "mcp"), ("openenv", "openenv"), ("verifiers", "verifiers"), ("verifiers_v1", "verifiers-v1")],
)
def test_a_shipped_configuration_without_its_library_says_what_to_install(
    name: str, extra: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(extra.partition("-")[0]) is not None:
        pytest.skip(f"{extra} is installed")
    data = grpo_runs.make_prompts(tmp_path / "data", 4)
    values = {"policy.model_name": sft_runs.MODEL, "policy.init": "random", "data.validation": None}
    values["logger.log_dir"] = tmp_path / "logs"
    values["data.train.path"] = None if name.startswith("verifiers") else data / "grpo.jsonl"
    overrides = sft_runs.as_overrides(values, {})
    done = shared_ray.run_here(["grpo", "--config", f"grpo_tiny_moe_{name}.yaml", *overrides], tmp_path, exit_code=2)
    assert f"pip install 'nemo-rl-moe[{extra}]'" in done.stderr

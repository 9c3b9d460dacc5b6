# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs with environments and tools of other libraries."""

import json
import math
import sys
from pathlib import Path

import pytest

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.functional import grpo_runs, sft_runs

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]
SUPPORT = Path(__file__).parents[1] / "support"
WITHOUT = "make test-libraries"


def read_calls(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Return a call for any text: an untrained model writes none."""
    return [ToolCall("look_up", {"word": "chat"})]


ANY_TEXT = ToolFormat(read_calls, TOOL_FORMATS["hermes"].example)


def test_an_environment_of_verifiers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers", reason=WITHOUT)
    monkeypatch.syspath_prepend(str(SUPPORT / "verifiers_modules"))
    changes = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 500,
        "env__name": "verifiers",
        "env__parameters": {"id": "sums-env", "reward": "digits"},
        "env__answer_after": None,
        "env__reasoning_gym": None,
        "env__score_truncated": True,
        "data__train__path": None,
        "data__validation__path": None,
        "grpo__max_num_epochs": 2,  # six prompts, four a step
        "grpo__val_num_generations": 1,
    }
    overrides = grpo_runs.settings(tmp_path, tmp_path, **changes, **sft_runs.only_jsonl())
    done = grpo_runs.run_here(overrides, tmp_path)
    assert done.returncode == 0, done.stderr
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
        "env__tools": ["calculator"],
        "env__mcp_servers": {"words": server},
        "env__tool_format": "tests.functional.test_library_runs:ANY_TEXT",
        "env__tool_limits__num_workers": 1,
        "env__tool_limits__call_timeout_s": 60.0,
        "env__max_turns": 2,
        "env__name": "callable",
        "env__callable": {"function": "tests.functional.grpo_runs:share_of_digits"},
        "env__answer_after": None,
        "env__score_truncated": True,
        "grpo__max_num_steps": 1,
        "data__validation": None,
    }
    done = grpo_runs.run_here(grpo_runs.settings(tmp_path, data, **changes, **sft_runs.only_jsonl()), tmp_path)
    assert done.returncode == 0, done.stderr
    run_folder = sft_runs.only_run_folder(tmp_path)
    samples = [json.loads(line) for line in (run_folder / SAMPLES_FILE_NAME).read_text().splitlines()]
    called = [sample for sample in samples if sample.get("num_turns") == 2]
    assert called
    assert all("<tool_response>chat x 3</tool_response>" in sample["response"] for sample in called)

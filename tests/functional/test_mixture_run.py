# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of two environments: each with tools, limits and rewards of its own; it goes on to the bit; slips in names."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from nemo_rl_moe.tools.formats.interface import ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.functional import grpo_runs, sft_runs

pytestmark = pytest.mark.shared_ray
ALWAYS_ADD = ToolFormat(
    lambda text, schemas, begins_in_thinking=False: [ToolCall("add", {"a": 40, "b": 2})],
    TOOL_FORMATS["hermes"].example,
)
NUM_STEPS = 4


def make_prompts(folder: Path, *, slip: str = "tools") -> Path:
    """Prompts of two environments in one file: four of five are `plain`."""
    grpo_runs.make_prompts(folder, 20)
    for path in (folder / "grpo.jsonl", folder / "validation_prompts.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for number, record in enumerate(records):
            record["environment"] = "plain" if number % 5 else "tools"
        records[-5]["environment"] = slip
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def settings(folder: Path, data: Path, **changes: Any) -> list[str]:
    values = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 1000,
        "policy__generation__max_new_tokens": 8,
        "policy__generation__stop_token_ids": list(range(0, 250, 4)),
        "grpo__max_num_steps": NUM_STEPS,
        "grpo__val_period": NUM_STEPS,
        "env__reward__kind": "callable",
        "env__reward__function": "tests.functional.grpo_runs:share_of_digits",
        "env__score_truncated": True,
        "env__mixture": {
            "plain": {"weight": 3.0},
            "tools": {
                "weight": 1.0,
                "driver": {
                    "kind": "tools",
                    "tools": ["tests.support.tool_functions:add"],
                    "format": "tests.functional.test_mixture_run:ALWAYS_ADD",
                    "limits": {"num_workers": 1},
                    "max_turns": 2,
                },
                "reward": {"function": "tests.functional.test_mixture_run:always_one"},
            },
        },
    }
    return grpo_runs.settings(folder, data, **(values | changes), **sft_runs.only_jsonl())


def always_one(item: object) -> float:
    """A reward function of the second environment alone."""
    return 1.0


def steps_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step, without seconds."""
    records = read_metrics(sft_runs.only_run_folder(folder) / METRICS_FILE_NAME)
    return {
        record.step: {
            key: value
            for key, value in record.metrics.items()
            if not key.startswith("timing/") and not key.endswith("seconds")
        }
        for record in records
    }


@pytest.mark.full
def test_two_environments_are_mixed_and_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    data = make_prompts(tmp_path / "data")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, num_steps in ((whole, NUM_STEPS), (parts, NUM_STEPS - 1), (parts, NUM_STEPS)):
        folder.mkdir(exist_ok=True)
        schedule = {"policy__megatron_cfg__scheduler__lr_decay_iters": NUM_STEPS}
        done = grpo_runs.run_here(settings(folder, data, grpo__max_num_steps=num_steps, **schedule), folder)
    assert f"{NUM_STEPS - 1} of {NUM_STEPS} steps are done" in done.stdout

    steps = steps_of(whole)
    for step in range(1, NUM_STEPS + 1):
        metrics = steps[step]
        # One prompt of each step of four is of the environment with a quarter of the weight.
        assert metrics["train/env/tools/share"] == 0.25
        assert metrics["train/env/plain/share"] == 0.75
        assert metrics["train/env/tools/reward"] == 1.0
        assert metrics["train/env/plain/reward"] < 1.0
        assert metrics["train/reward"] == pytest.approx(0.25 + 0.75 * metrics["train/env/plain/reward"])
        assert metrics["train/env/tools/tools/calls"] > 0
        assert "train/env/plain/tools/calls" not in metrics
        assert "train/env/plain/mean_turns_per_sample" not in metrics
        assert math.isfinite(metrics["train/loss"])
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
    assert {"val/env/plain/accuracy", "val/env/tools/pass_at_2"} <= steps[NUM_STEPS].keys()

    samples = sft_runs.samples_of(sft_runs.only_run_folder(whole))
    for sample in samples:
        is_of_tools = "tools" in sample["environment"]
        assert is_of_tools == (sample["reward"] == 1.0)
        assert is_of_tools or sample.get("num_turns", 1) == 1
    assert steps_of(parts)[NUM_STEPS] == steps[NUM_STEPS]


@pytest.mark.slow
def test_two_environments_are_mixed_where_rollouts_run_ahead(tmp_path: Path) -> None:
    data = make_prompts(tmp_path / "data")
    changes = {
        "grpo__rollouts__mode": "asynchronous",
        "grpo__rollouts__order": "in_order",
        "policy__generation__backend": "tests.support.transformers_engine:make_streaming_engine",
        "loss_fn__importance_sampling_correction": "truncated",
    }
    grpo_runs.run_here(settings(tmp_path, data, **changes), tmp_path)
    steps = steps_of(tmp_path)
    for step in range(1, NUM_STEPS + 1):
        metrics = steps[step]
        assert metrics["train/env/tools/share"] == 0.25
        assert metrics["train/env/tools/reward"] == 1.0
        assert metrics["train/env/tools/tools/calls"] > 0
        assert metrics["train/env/plain/reward"] < 1.0
        assert math.isfinite(metrics["train/loss"])
    assert [steps[step]["train/staleness/max"] for step in range(1, NUM_STEPS + 1)] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("slip", ["tool", pytest.param(3, marks=pytest.mark.full)])
def test_a_record_of_an_environment_that_does_not_exist_ends_the_run_before_it_starts(
    slip: object, tmp_path: Path
) -> None:
    data = make_prompts(tmp_path / "data", slip=slip)  # type: ignore[arg-type]
    done = grpo_runs.run_here(settings(tmp_path, data), tmp_path, exit_code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    hint = "; did you mean tools?" if slip == "tool" else ""
    assert line == (
        f"error: {data}/grpo.jsonl:16: environment is {slip!r}, expected an environment of env.mixture: plain, tools"
        f"{hint} (data.environment_key: environment)"
    )
    assert "starting" not in done.stdout

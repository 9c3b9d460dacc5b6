# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose environment asks a second question that depends on the first answer."""

import math
import os
from pathlib import Path

import pytest

from tests.functional import grpo_runs, sft_runs

pytestmark = pytest.mark.shared_ray


def test_trajectories_of_two_turns_are_trained_on(tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    turns = {
        "env__driver__kind": "function",
        "env__driver__function": "tests.functional.grpo_runs:ask_twice",
        "policy__generation__max_new_tokens": 6,
        "grpo__max_num_steps": 2,
        "loss_fn__force_on_policy_ratio": "never",
    }
    settings = grpo_runs.settings(tmp_path, data, **turns, **sft_runs.only_jsonl())
    grpo_runs.run_here(settings, tmp_path)
    steps, samples = sft_runs.outcome_of(tmp_path)
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["train/mean_turns_per_sample"] == 2.0
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/env/num_digits"] == metrics["train/reward"] * 16
        # Training sees the tokens of both turns as generation saw them, with what the environment put between them.
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
    samples = [sample for sample in samples if sample["split"] == "train"]
    assert len(samples) == 2 * 16
    assert {sample["num_turns"] for sample in samples} == {2}
    assert all("+1=" in sample["response"] for sample in samples)
    assert len({sample["response"].split("+1=")[0][-1] for sample in samples}) > 1, "the questions differ"
    assert {sample["weight_version"] for sample in samples} == {0, 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "reason", "metric"),
    [
        ("await", "took longer than env.rollout_timeout_s=2 (at grpo_runs.py:", "num_timeouts"),
        ("block", "its code blocked the process for more than 2 s", "num_timeouts"),
        ("exits", "the process of its trajectories ended: exit code 3", "num_died"),
        pytest.param("raises", "SystemExit: 3", "num_errors", marks=pytest.mark.slow),
        pytest.param("allocates", "MemoryError", "num_errors", marks=pytest.mark.slow),
    ],
)
def test_code_of_a_function_costs_its_trajectories_alone(
    how: str, reason: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(grpo_runs.HANG_FILE).write_text(how)
    data = grpo_runs.make_prompts(tmp_path / "data", 12)
    turns = {
        "env__driver__kind": "function",
        "env__driver__function": "tests.functional.grpo_runs:ask_twice_or_hang",
        "env__rollout_timeout_s": 2.0,
        "grpo__rollouts__process_memory_mb": 300,
        "policy__generation__max_new_tokens": 6,
        "grpo__max_num_steps": 1,
        "data__validation": None,
    }
    done = grpo_runs.run_here(
        grpo_runs.settings(tmp_path, data, **turns, **sft_runs.only_jsonl()), Path(os.curdir).absolute()
    )
    (reported,) = [line for line in done.stdout.splitlines() if "failed to score" in line]
    assert reason in reported
    (metrics,) = sft_runs.steps_of(sft_runs.only_run_folder(tmp_path))
    assert 0 < metrics[f"train/env/{metric}"] < 16
    assert math.isfinite(metrics["train/loss"])

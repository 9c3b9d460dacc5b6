# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of GRPO whose rewards teach nothing: they say so at once, or stop."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.environments.interface import ScoringItem
from nemo_rl_moe.report.run_findings import findings_of
from nemo_rl_moe.run_folder.run_data import read_run
from tests.functional import grpo_runs, sft_runs

pytestmark = pytest.mark.shared_ray


def misspelt(item: ScoringItem) -> bool:
    return bool(item.record["anwser"] == item.response)


def fails_at_times(item: ScoringItem) -> float:
    if any(digit in item.response for digit in "02468"):
        raise ValueError("even")
    return sum(character.isdigit() for character in item.response) / 12


def always_the_same(item: ScoringItem) -> float:
    return 0.5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grpo_runs.make_prompts(tmp_path_factory.mktemp("data"), 40)


def run_with(reward: str, folder: Path, data: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    """A run whose reward function is one of the above."""
    scored_by = {
        "env__name": "callable",
        "env__callable": {"function": f"{__name__}:{reward}"},
        "env__answer_after": None,
        "env__score_truncated": True,
    }
    return grpo_runs.run_here(grpo_runs.settings(folder, data, **sft_runs.only_jsonl(), **scored_by, **changes), folder)


def test_a_reward_that_always_raises_stops_the_run_with_its_own_error(tmp_path: Path, data: Path) -> None:
    done = run_with("misspelt", tmp_path, data, data__validation=None)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "error: the environment scored no response of a step or validation: 16 of 16 failed, the first with KeyError:"
        f" 'anwser' (sample {data / 'grpo.jsonl'}:"
    ) in done.stderr
    assert "(grpo.max_consecutive_failed_steps: 1)" in done.stderr
    assert "warning: the environment failed to score a response, which gets reward 0: KeyError: 'anwser'" in done.stdout
    run = read_run(sft_runs.only_run_folder(tmp_path))
    assert "train/loss" not in run.metrics, "nothing is trained"


@pytest.mark.slow
def test_some_failures_are_told_at_once_and_counted(tmp_path: Path, data: Path) -> None:
    # data.validation=null and a run that ends in its warm-up: each is one override.
    changes = {"policy__megatron_cfg__scheduler__lr_warmup_iters": 20, "grpo__max_num_steps": 2}
    done = run_with("fails_at_times", tmp_path, data, data__validation=None, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "failed to score" in line]
    assert len(told) == 1
    assert told[0].startswith(
        "warning: the environment failed to score a response, which gets reward 0: ValueError: even (sample "
    )
    assert "warning: the learning rate is still warming up when the run ends: 2 of the 20 steps" in done.stdout
    assert "warning: data.validation is null: there is no validation; without effect: grpo.val_period" in done.stdout
    run = read_run(sft_runs.only_run_folder(tmp_path))
    assert all(0 < count < 16 for count in run.metrics["train/env/num_errors"].values)
    assert not [key for key in run.metrics if key.startswith("val/")]
    assert run.metrics["train/lr"].values.tolist() == pytest.approx([1e-4 / 20, 2e-4 / 20])


@pytest.mark.slow
def test_rewards_without_a_spread_are_a_finding(tmp_path: Path, data: Path) -> None:
    # Validation on the training prompts, too.
    same_prompts = {"data__validation__path": data / "grpo.jsonl"}
    done = run_with("always_the_same", tmp_path, data, logger__alerts__idle_steps=2, **same_prompts)
    assert done.returncode == 0, done.stdout + done.stderr
    text = "every advantage has been 0 since step 1: rewards that are compared are equal (mean 0.5), and teach nothing"
    assert f"warning: step 2: {text}" in done.stdout
    assert "validating with the training prompts" in done.stdout
    run = read_run(sft_runs.only_run_folder(tmp_path))
    assert [(found.kind, found.text) for found in findings_of(run)] == [("no_advantages", text)]
    assert run.metrics["val/reward"].values.tolist() == [0.5] * 3

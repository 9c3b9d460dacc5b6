# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of GRPO whose rewards teach nothing: they say so at once, or stop."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.rewards.interface import ScoringItem
from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.report.run_findings import findings_of
from tests.functional import grpo_runs, sft_runs

pytestmark = pytest.mark.shared_ray


def misspelt(item: ScoringItem) -> bool:
    return bool(item.record["anwser"] == item.response)


def fails_at_times(item: ScoringItem) -> float:
    if any(digit in item.response for digit in "02468"):
        raise ValueError("even")
    return sum(character.isdigit() for character in item.response) / 12


def negative_or_fails(item: ScoringItem) -> dict[str, float]:
    """Return rewards of which the second has a fault of its own: it is always 0."""
    if any(digit in item.response for digit in "0246"):
        raise ValueError("even")
    return {"cost": -1.0 - sum(character.isdigit() for character in item.response) / 12, "form": 0.0}


def always_the_same(item: ScoringItem) -> float:
    return 0.5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grpo_runs.make_prompts(tmp_path_factory.mktemp("data"), 40)


def run_with(
    reward: str, folder: Path, data: Path, exit_code: int = 0, **changes: Any
) -> subprocess.CompletedProcess[str]:
    """A run whose reward function is one of the above."""
    scored_by = {
        "env__reward__kind": "callable",
        "env__reward__function": f"{__name__}:{reward}",
        "env__score_truncated": True,
    }
    settings = grpo_runs.settings(folder, data, **sft_runs.only_jsonl(), **scored_by, **changes)
    return grpo_runs.run_here(settings, folder, exit_code=exit_code)


def test_a_reward_that_always_raises_stops_the_run_with_its_own_error(tmp_path: Path, data: Path) -> None:
    done = run_with("misspelt", tmp_path, data, exit_code=1, data__validation=None)
    assert (
        f"error: env.reward.function: {__name__}:misspelt scored no response of a step or validation: 16 of 16"
        " failed, the first with KeyError: 'anwser' (test_rewards_that_fail.py:"
    ) in done.stderr
    assert f" (sample {data / 'grpo.jsonl'}:" in done.stderr
    assert "(grpo.max_consecutive_failed_steps: 1)" in done.stderr
    assert (
        f"warning: env.reward.function: {__name__}:misspelt failed to score a response, which is not trained on:"
        " KeyError: 'anwser'"
    ) in done.stdout
    run = read_run(sft_runs.only_run_folder(tmp_path))
    assert "train/loss" not in run.metrics, "nothing is trained"


@pytest.mark.full
def test_failures_are_left_out_and_reported_at_the_start_while_it_runs_and_at_the_end(
    tmp_path: Path, data: Path
) -> None:
    """Real rewards are negative: a policy that got 0 for breaking its reward function would learn to."""
    steps = {"grpo__max_num_steps": 2, "data__validation": None, "logger__num_samples_to_save": None}
    named = {"env__reward_weights": {"cost": 1.0, "form": 0.5}, "logger__alerts__idle_steps": 2}
    done = run_with("negative_or_fails", tmp_path, data, **steps, **named)
    folder = sft_runs.only_run_folder(tmp_path)
    samples = sft_runs.samples_of(folder)
    failed = [sample for sample in samples if sample["fault"]]
    assert 0 < len(failed) < len(samples) == 32
    (fault,) = {sample["fault"] for sample in failed}
    assert re.fullmatch(r"error: ValueError: even \(test_rewards_that_fail\.py:\d+\)", fault)
    run = read_run(folder)
    for row, step in enumerate((1, 2)):
        of_step = [sample for sample in samples if sample["step"] == step]
        scored = [sample["reward"] for sample in of_step if not sample["fault"]]
        assert run.metrics["train/reward"].values[row] == pytest.approx(sum(scored) / len(scored))
        assert run.metrics["train/env/failed_share"].values[row] == 1 - len(scored) / len(of_step)
        trained = [sample["num_tokens"] for group in _groups(of_step) for sample in group]
        assert run.metrics["train/num_valid_tokens"].values[row] == sum(trained)
    cause = f"{fault.removeprefix('error: ')} (sample {data / 'grpo.jsonl'}:"
    kinds = [found.kind for found in findings_of(run)]
    assert kinds == ["constant_reward", "failed_responses"]
    assert (
        f"warning: step 1: {len([sample for sample in failed if sample['step'] == 1])} of 16 responses" in done.stdout
    )
    summary = done.stdout.partition("2 steps done.")[2]
    assert (
        f"  warning: {len(failed)} responses could not be scored, {len(failed) / 32:.0%} of all in 2 steps;" in summary
    )
    assert f"the first at step 1: {cause}" in summary
    assert "  warning: the reward 'form' has been 0 in every response since step 1" in summary


def _groups(samples: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Scored responses of each prompt that has two of them or more."""
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        if not sample["fault"]:
            found.setdefault(sample["sample_id"], []).append(sample)
    return [group for group in found.values() if len(group) > 1]


@pytest.mark.full
@pytest.mark.parametrize("on_failure", ["leave_out", "lowest"])
def test_a_run_goes_on_behind_steps_without_any_score_and_they_change_no_weights(
    on_failure: str, tmp_path: Path, data: Path
) -> None:
    changes = {
        "grpo__max_consecutive_failed_steps": None,
        "grpo__max_num_steps": 2,
        "env__on_failure": on_failure,
        "data__validation": None,
        "policy__megatron_cfg__scheduler__lr_warmup_iters": 10,
    }
    done = run_with("misspelt", tmp_path, data, **changes)
    assert done.stdout.count(" scored no response of a step or validation: 16 of 16 failed") == 1
    assert "a step without a scored response changes no weights" in done.stdout
    run = read_run(sft_runs.only_run_folder(tmp_path))
    assert run.metrics["train/env/num_groups_left_out"].values.tolist() == [4.0, 4.0]
    assert "train/reward" not in run.metrics
    # An update without a trained token is left out, and with it a step of the schedule.
    assert "train/loss" not in run.metrics
    assert "train/lr" not in run.metrics
    assert "  warning: 32 responses could not be scored, 100% of all in 2 steps" in done.stdout


@pytest.mark.slow
def test_some_failures_are_reported_at_once_and_counted(tmp_path: Path, data: Path) -> None:
    # data.validation=null and a run that ends in its warm-up: each is one override.
    changes = {"policy__megatron_cfg__scheduler__lr_warmup_iters": 20, "grpo__max_num_steps": 2}
    done = run_with("fails_at_times", tmp_path, data, data__validation=None, **changes)
    reported = [line for line in done.stdout.splitlines() if "failed to score" in line]
    assert len(reported) == 1
    assert reported[0].startswith(
        f"warning: env.reward.function: {__name__}:fails_at_times failed to score a response, which is not trained"
        " on: ValueError: even (test_rewards_that_fail.py:"
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
    text = "every advantage has been 0 since step 1: rewards that are compared are equal (all 0.5), and teach nothing"
    assert f"warning: step 2: {text}" in done.stdout
    assert "validating with the training prompts" in done.stdout
    run = read_run(sft_runs.only_run_folder(tmp_path))
    assert [(found.kind, found.text) for found in findings_of(run)] == [("no_advantages", text)]
    assert run.metrics["val/reward"].values.tolist() == [0.5] * 3

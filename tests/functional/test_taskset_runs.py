# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of GRPO on tasksets of verifiers.v1, whose chat program runs without a network."""

import importlib.metadata
import math
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.functional import grpo_runs, run_kills, sft_runs, shared_ray

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]
MODULES = Path(__file__).parents[1] / "support/verifiers_modules"
START_LIMIT_S, END_LIMIT_S = 400.0, 200.0


def require(release: str) -> None:
    """Skip where another release is installed, or none."""
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if not found.startswith(release):
        pytest.skip(f"verifiers {found} is installed: make test-libraries")


def settings(folder: Path, taskset: dict[str, Any], **changes: Any) -> list[str]:
    values = {
        "policy__model_name": sft_runs.REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools",
        "policy__max_total_sequence_length": 500,
        "policy__generation__max_new_tokens": 8,
        "env__driver__kind": "verifiers_v1",
        "env__driver__id": "sums-v1",
        "env__driver__taskset": taskset,
        "env__driver__validation": {"split": "test", "wants": "digits"},
        "env__driver__limits__num_workers": 2,
        "env__reward": None,
        "env__score_truncated": True,
        "data__train__path": None,
        "data__validation__path": None,
        "grpo__num_prompts_per_step": 2,
        "policy__train_global_batch_size": 8,
        "grpo__max_num_steps": 2,
        "grpo__val_num_generations": 1,
        **changes,
    }
    return grpo_runs.settings(folder, folder, **values, **sft_runs.only_jsonl())


@pytest.mark.parametrize(("taskset", "num_turns"), [({}, 1), ({"asks_again": True}, 2)])
def test_a_taskset_trains(
    taskset: dict[str, Any], num_turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("0.4")
    monkeypatch.syspath_prepend(str(MODULES))
    grpo_runs.run_here(settings(tmp_path, taskset), tmp_path)
    steps, samples = sft_runs.outcome_of(tmp_path)
    assert len(steps) == 2
    for metrics in steps:
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/env/failed_share"] == 0
        assert metrics.get("train/mean_turns_per_sample", 1) == num_turns
        assert metrics["train/agent/refused_requests"] == 0
        assert metrics["train/reward"] == pytest.approx(2 * metrics["train/verifiers/digits"])
        # Training sees the tokens as generation saw them.
        assert abs(metrics["train/token_mult_prob_error"] - 1) < 1e-5
    trained = [sample for sample in samples if sample["split"] == "train"]
    for sample in trained:
        text = "".join(turn["text"] for turn in sample["conversation"] if turn["role"] == "assistant")
        assert sample["reward"] == pytest.approx(2 * sum(map(str.isdigit, text)) / max(len(text), 1), abs=0.05)
    assert {sample["sample_id"].partition("[")[2] for sample in samples if sample["split"] != "train"} == {
        "eval]:0",
        "eval]:1",
    }


def test_failing_episodes_are_counted_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("0.4")
    monkeypatch.setenv("PYTHONPATH", f"{sft_runs.REPOSITORY_ROOT}:{MODULES}")
    changes = {
        "grpo__num_prompts_per_step": 6,
        "grpo__num_generations_per_prompt": 2,
        "policy__train_global_batch_size": 12,
        "policy__train_micro_batch_size": 2,
        "grpo__max_num_steps": 1,
    }
    overrides = settings(tmp_path, {"wants": "hangs"}, env__rollout_timeout_s=30.0, data__validation=None, **changes)
    sleeping: set[psutil.Process] = set()
    with run_kills.running(grpo_runs.command(overrides), tmp_path / "work") as run:
        while run.process.poll() is None:
            sleeping |= {each for each in run.family() if "sleep" in sft_runs.words_of(each)}
        assert run.wait_for_end(START_LIMIT_S) == 0, run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
    [metrics] = sft_runs.outcome_of(tmp_path)[0]
    assert metrics["train/env/num_timeouts"] == 2, "the responses to one of six prompts"
    assert sleeping
    assert not sft_runs.running(list(sleeping))


def test_nothing_is_left_of_episodes_whose_run_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("0.4")
    monkeypatch.setenv("PYTHONPATH", f"{sft_runs.REPOSITORY_ROOT}:{MODULES}")
    """While servers of tools run, which are in sessions of their own."""
    overrides = settings(tmp_path, {"task": {"with_tool": True}}, data__validation=None)
    with run_kills.running(grpo_runs.command(overrides), tmp_path / "work") as run:
        run.wait_for(lambda: any("sums_v1" in sft_runs.words_of(each) for each in run.family()), START_LIMIT_S)
        family = run.family()
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGINT)
        run.wait_for_end(END_LIMIT_S)
        run.wait_until_nothing_runs(END_LIMIT_S)
    assert not sft_runs.running(family)


@pytest.mark.parametrize(
    ("kind", "name", "installed", "message"),
    [
        ("verifiers", "sums-env", "0.4", "expected a release from 0.2 up to below 0.4"),
        ("verifiers_v1", "sums-v1", "0.3", "verifiers 0.3"),
        ("verifiers_v1", "sums-v1", "none", "verifiers is not installed; pip install 'nemo-rl-moe[verifiers-v1]'"),
    ],
)
def test_the_wrong_release_is_named(
    kind: str, name: str, installed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(installed)
    monkeypatch.syspath_prepend(str(MODULES))
    overrides = settings(tmp_path, {}, env__driver__id=name)
    if kind == "verifiers":
        overrides = [each for each in overrides if not each.startswith("env.driver.")]
        overrides += [f"env.driver.kind={kind}", f"env.driver.id={name}"]
    done = shared_ray.run_here(["config", "--config", str(grpo_runs.EXEMPLAR), *overrides], tmp_path, exit_code=2)
    assert message in done.stderr

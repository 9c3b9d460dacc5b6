# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measured sequences of a GRPO run as a capture folder: the audit has the run's own numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.runs.folder.capture_folder import CAPTURE_FOLDER, read_description, read_step, steps_of
from tests.functional import grpo_runs, sft_runs
from tests.support.logged_metrics import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.shared_ray, pytest.mark.timeout(900)]

OF_RUN_ALONE = ("clip_fraction", "_in_force", "_engine", "_layer_")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two measured steps of three, of one update each."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "work").mkdir()
    settings = grpo_runs.settings(
        folder,
        grpo_runs.make_prompts(folder / "data", 40),
        policy__megatron_cfg__routing_measurements={"every_n_steps": 1, "share_of_tokens": 1.0, "save_capture": True},
        grpo__max_num_steps=2,
        **sft_runs.only_jsonl(),
    )
    done = grpo_runs.run_here(settings, folder / "work")
    assert done.returncode == 0, done.stdout + done.stderr
    return sft_runs.only_run_folder(folder)


@pytest.fixture(scope="module")
def audited(run_folder: Path) -> dict[int, dict[str, float]]:
    """Metrics of each step, by the audit of the run's folder."""
    output = run_folder.parent / "audit.json"
    assert cli.main(["audit", str(run_folder), "--json", str(output)]) == 0
    (run,) = json.loads(output.read_text())
    return {step["step"]: step["metrics"] for step in run["steps"]}


def logged(run_folder: Path, prefix: str) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for key, points in read_jsonl(run_folder / "metrics.jsonl").items():
        if key.startswith(f"train/{prefix}") and not any(part in key for part in OF_RUN_ALONE):
            for step, value in points:
                found.setdefault(step, {})[key.removeprefix("train/")] = value
    return found


@pytest.mark.parametrize("family", ["moe/routing_split/", "moe/routing_noise/"])
def test_the_split_and_the_noise_are_the_run_s_own(
    run_folder: Path, audited: dict[int, dict[str, float]], family: str
) -> None:
    own = logged(run_folder, family)
    assert own.keys() == audited.keys() == {1, 2}
    for step, values in own.items():
        found = {key: value for key, value in audited[step].items() if key.startswith(family)}
        assert found.keys() == values.keys()
        assert found == pytest.approx(values, rel=1e-9, abs=1e-12)


def test_the_statistics_is_that_of_training(run_folder: Path, audited: dict[int, dict[str, float]]) -> None:
    own = logged(run_folder, "moe/routing/rows_")
    assert own.keys() == {1, 2}
    for step, values in own.items():
        found = {key: audited[step][key] for key in values}
        assert found == values, "of the same rows"
    agreement = logged(run_folder, "moe/routing/live_agreement")
    assert agreement.keys() == {1, 2}
    for step, values in agreement.items():
        # The passes that measure have other batches than the one that trains: near ties may differ.
        (key,) = values
        assert audited[step][key] == pytest.approx(values[key], abs=2e-3)
    rewards = logged(run_folder, "reward")
    assert [audited[step]["reward"] for step in (1, 2)] == pytest.approx([rewards[step]["reward"] for step in (1, 2)])


def test_everything_of_a_sequence_is_there(run_folder: Path) -> None:
    folder = run_folder / CAPTURE_FOLDER
    description = read_description(folder)
    assert description.is_exact, "in float32 on both sides"
    parts: list[Any] = list(read_step(description, 2, steps_of(folder)[2]))
    assert sum(len(part.lengths) for part in parts) == 16
    for part in parts:
        assert {"token_ids", "loss_mask", "rollout_experts", "training_experts", "advantages"} <= part.columns.keys()
        assert {"rollout_logprobs", "training_logprobs", "replayed_logprobs"} <= part.columns.keys()
        sampled = part.columns["weight_versions"] >= 0
        assert set(part.columns["weight_versions"][sampled].tolist()) == {1}
        np.testing.assert_array_equal(sampled, part.columns["loss_mask"])
    assert sum("repeated_experts" in part.columns for part in parts) == 1

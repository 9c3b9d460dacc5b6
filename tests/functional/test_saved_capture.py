# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measured sequences of a GRPO run as a capture folder: the audit has the run's own numbers."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.policy import model_workers
from nemo_rl_moe.models.policy.start_rank import start_rank
from nemo_rl_moe.runs.folder.capture_folder import CAPTURE_FOLDER, read_description, read_step, steps_of
from tests.functional import grpo_runs, sft_runs
from tests.support.loggers import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.shared_ray, pytest.mark.timeout(900)]

OF_RUN_ALONE = ("clip_fraction", "_in_force", "_engine", "_layer_")


def measured_run(folder: Path, num_steps: int, every: int, share_of_tokens: float, **changes: Any) -> Path:
    measurements = {"every_n_steps": every, "share_of_tokens": share_of_tokens, "save_capture": True}
    settings = grpo_runs.settings(
        folder,
        grpo_runs.make_prompts(folder / "data", 40),
        policy__megatron_cfg__routing_measurements=measurements,
        grpo__max_num_steps=num_steps,
        **changes,
        **sft_runs.only_jsonl(),
    )
    grpo_runs.run_here(settings, folder / "work")
    return sft_runs.only_run_folder(folder)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two measured steps of three, of one update each."""
    return measured_run(tmp_path_factory.mktemp("run"), 2, 1, 1.0)


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


RATE = 0.01
WITH_BIAS = {
    "policy__megatron_cfg__moe_router_enable_expert_bias": True,
    "policy__megatron_cfg__moe_router_score_function": "sigmoid",
    "policy__megatron_cfg__moe_router_bias_update_rate": RATE,
}


def start_frozen(rank: int, world_size: int, **kwargs: Any) -> MegatronModel | UserError:
    """A rank in which Megatron-Core leaves the expert bias as it is."""
    module: Any = import_module("megatron.core.distributed.finalize_model_grads")
    started = start_rank(rank, world_size, **kwargs)
    module._update_router_expert_bias = lambda *args, **kwargs: None
    return started


def group_of_frozen(cluster: RayCluster, make_worker: partial[Any], **settings: Any) -> WorkerGroup[MegatronModel]:
    return WorkerGroup(cluster, partial(start_frozen, **make_worker.keywords), **settings)


def biased_run(folder: Path, num_steps: int, every: int, **changes: Any) -> Path:
    return measured_run(folder, num_steps, every, 0.5, grpo__val_period=0, **WITH_BIAS, **changes)


def findings_of(run_folder: Path) -> list[str]:
    output = run_folder.parent / "audit.json"
    code = cli.main(["audit", str(run_folder), "--json", str(output)])
    (run,) = json.loads(output.read_text())
    found = [finding["text"] for finding in run["findings"]] + [
        text for step in run["steps"] for text in step["findings"]
    ]
    assert code == bool(found)
    return found


TWO_STAGES = {"policy__megatron_cfg__pipeline_model_parallel_size": 2}
TWO_UPDATES = {"policy__train_global_batch_size": 8}


@pytest.mark.parametrize(("num_steps", "every", "changes"), [(3, 1, TWO_STAGES), (4, 2, TWO_UPDATES)])
def test_an_expert_bias_that_stands_still_is_found_in_the_capture(
    num_steps: int, every: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_workers, "WorkerGroup", group_of_frozen)
    (finding,) = findings_of(biased_run(tmp_path, num_steps, every, **changes))
    assert finding.startswith("the expert bias of 4 layers has not moved since step 2, ")


@pytest.mark.parametrize("changes", [TWO_STAGES, TWO_UPDATES])
def test_a_healthy_expert_bias_has_no_finding(changes: dict[str, Any], tmp_path: Path) -> None:
    run_folder = biased_run(tmp_path, 4, 1, **changes)
    assert findings_of(run_folder) == []
    description, files = read_description(run_folder / CAPTURE_FOLDER), steps_of(run_folder / CAPTURE_FOLDER)
    found = {step: next(read_step(description, step, paths)) for step, paths in files.items()}
    assert [rows.expert_bias is not None for rows in found.values()] == [False, True, True, True]
    for rows in list(found.values())[1:]:
        assert rows.expert_bias is not None
        assert rows.expert_bias_before is not None
        moved = np.abs(rows.expert_bias - rows.expert_bias_before)
        assert moved.shape == (4, 8)
        # Experts whose load was the mean stay.
        assert set(np.round(moved / RATE, 3).flatten().tolist()) <= {0.0, 1.0}
        assert (moved.max(1) > 0).all()
    if changes is TWO_STAGES:
        for before, after in ((2, 3), (3, 4)):
            np.testing.assert_array_equal(found[after].expert_bias_before, found[before].expert_bias)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images with asynchronous rollouts: a run trains while copies of the model answer, and goes on where it stopped."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE
from nemo_rl_moe.rollouts.dispatch.schedule import read_schedule
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from tests.functional import grpo_runs, sft_runs, shared_ray, vision_runs

pytestmark = [pytest.mark.slow, pytest.mark.shared_ray, pytest.mark.timeout(600)]
STEPS_AN_EPOCH = 10


def trained(folder: Path, shapes: Path, num_steps: int) -> str:
    """Train, or go on, until so many steps are done; return what was printed."""
    changes: dict[str, Any] = {
        **sft_runs.only_jsonl(),
        **vision_runs.grpo_changes(shapes),
        "policy__megatron_cfg__optimizer__lr": 1e-3,
        "policy__generation__backend": "megatron_separate",
        "grpo__max_num_steps": num_steps,
        "grpo__max_num_epochs": 1,
        "grpo__rollouts__mode": "asynchronous",
        "grpo__rollouts__order": "ready_first",
        "loss_fn__importance_sampling_correction": "truncated",
        "checkpointing__save_period": 1,
        "checkpointing__metric_name": None,
        "cluster__cpu_workers_per_node": 1,
    }
    overrides = grpo_runs.settings(folder, shapes, **changes)
    overrides.append(f"+cluster.roles.{GENERATION_ROLE}={{}}")
    return shared_ray.run_here(["grpo", "--config", str(vision_runs.GRPO_EXEMPLAR), *overrides], folder).stdout


def test_a_run_with_images_trains_while_others_are_answered(tmp_path: Path) -> None:
    """Groups with images in the queue are drawn again when it goes on; each prompt is trained on once."""
    shapes = vision_runs.make_shapes(tmp_path / "shapes")
    trained(tmp_path, shapes, STEPS_AN_EPOCH // 2)
    assert "step_5" in trained(tmp_path, shapes, STEPS_AN_EPOCH)
    run_folder = sft_runs.only_run_folder(tmp_path)
    steps = {record.step: record.metrics for record in read_metrics(run_folder / METRICS_FILE_NAME)}
    of_training = [steps[step] for step in range(1, STEPS_AN_EPOCH + 1)]
    assert max(metrics["train/staleness/max"] for metrics in of_training) == 1
    assert all(metrics["train/grad_norm"] > 0 for metrics in of_training)
    fresh = [metrics for metrics in of_training if metrics["train/staleness/max"] == 0]
    assert fresh
    for metrics in fresh:
        assert metrics["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5), "the engine saw the same images"
    assert all(metrics["train/refit/checks_failed"] == 0 for metrics in of_training)
    groups = [group for step in read_schedule(run_folder / SCHEDULE_FILE) for group in step.groups]
    assert sorted(group.position for group in groups) == list(range(4 * STEPS_AN_EPOCH))

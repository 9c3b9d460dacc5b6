# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from nemo_rl_moe.algorithms.step_recorder import RunSummary
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.launch.setup import summarise


@pytest.mark.parametrize(("content", "is_named"), [(None, False), ("", False), ("{}\n", True)])
def test_responses_are_named_where_the_run_wrote_some(content: str | None, is_named: bool, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "samples.jsonl").write_text(content)
    config = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    lines = summarise(config, RunSummary.of(LoopState(step=3), None), tmp_path, weights=None, loggers=()).splitlines()
    assert (f"  responses, a line each        {tmp_path / 'samples.jsonl'}" in lines) is is_named
    assert f"  the run on one page           nemo-rl-moe report {tmp_path}" in lines
    assert f"  every metric, a line a step   {tmp_path / 'metrics.jsonl'}" in lines


@pytest.mark.parametrize(("metrics", "expected"), [({"train/refit/logprob_gap": 6.72e-6}, ["6.7e-06 nats"]), ({}, [])])
def test_the_last_refit_check_is_reported_where_there_was_one(
    metrics: dict[str, float], expected: list[str], tmp_path: Path
) -> None:
    config = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    lines = summarise(
        config, RunSummary.of(LoopState(step=3, last_training=metrics), None), tmp_path, weights=None, loggers=()
    )
    reported = [line for line in lines.splitlines() if line.startswith("  refit check of the last step: ")]
    assert [" ".join(line.split()[-5:-2]) for line in reported] == [f"by {gap}" for gap in expected]


@pytest.mark.parametrize(
    ("first", "line"), [(0.6641, "  validation accuracy: 0.6641"), (0.25, "  validation accuracy: 0.2500 -> 0.6641")]
)
def test_the_only_validation_is_one_number(first: float, line: str, tmp_path: Path) -> None:
    config = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    state = LoopState(step=3, first_validation={"val/accuracy": first}, last_validation={"val/accuracy": 0.6641})
    lines = summarise(config, RunSummary.of(state, None), tmp_path, weights=None, loggers=())
    assert line in lines.splitlines()


def test_loggers_that_have_failed_are_not_offered(tmp_path: Path) -> None:
    config = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    assert config.logger.mlflow_enabled
    assert config.logger.tensorboard_enabled
    summary = RunSummary.of(LoopState(step=3), None)
    offered = summarise(config, summary, tmp_path, weights=None, loggers=("jsonl", "tensorboard"))
    assert "  TensorBoard  " in offered
    assert "MLflow" not in offered

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sockets of a whole GRPO run with every kind of process that one machine has: nobody outside reaches any of them."""

from pathlib import Path

import pytest

from tests.functional import grpo_runs, run_kills

ENGINE = "tests.support.transformers_engine:make_engine"
START_LIMIT_S = 240.0
NUM_STEPS = 3


@pytest.mark.full
def test_a_run_of_grpo_listens_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    """Two ranks with a reference model, workers of the environment, an engine with its own copy, all loggers.

    Seen from the start to the end, so that what only a refit or a checkpoint opens is seen too.
    """
    overrides = grpo_runs.settings(
        tmp_path,
        grpo_runs.make_prompts(tmp_path / "data", 40),
        cluster__cpu_workers_per_node=2,
        env__reward__kind="callable",
        env__reward__function="tests.functional.grpo_runs:share_of_digits",
        env__reward__num_workers=2,
        grpo__max_num_steps=NUM_STEPS,
        loss_fn__reference_policy_kl_penalty=0.01,
        policy__generation__backend=ENGINE,
        checkpointing__save_period=2,
        logger__tensorboard_enabled=True,
        logger__wandb_enabled=True,
        logger__mlflow_enabled=True,
    )
    seen: set[tuple[str, str]] = set()

    def look(run: run_kills.Run) -> bool:
        seen.update(run.listening())
        return f"step {NUM_STEPS}/" in run.printed

    with run_kills.running(grpo_runs.command(overrides), tmp_path / "work") as run:
        run.wait_for(lambda: look(run), START_LIMIT_S)
        assert run.wait_for_end(START_LIMIT_S) == 0, run.errors
    assert {name for _, name in seen} >= {"raylet", "gcs_server"}, "the servers of Ray were looked at"
    assert any(name.startswith("ray::") for _, name in seen), f"and its workers: {seen}"
    assert {address for address, _ in seen} <= run_kills.LOOPBACK, seen

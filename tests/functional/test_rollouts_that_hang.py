# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run whose tool hangs says so, stops when it is asked to, and goes on as if nothing had happened."""

import signal
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.launch.rollouts import SCHEDULE_FILE
from nemo_rl_moe.rollouts.dispatch.schedule import read_schedule
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from tests.functional import grpo_runs, run_kills, sft_runs

START_LIMIT_S = 240.0
END_LIMIT_S = 120.0
NUM_STEPS = 5


def command(folder: Path, data: Path, exemplar: Path = grpo_runs.EXEMPLAR, **more: Any) -> list[str]:
    changes: dict[str, Any] = {
        "env__driver__kind": "function",
        "env__driver__function": "tests.functional.grpo_runs:ask_twice_or_hang",
        "env__rollout_timeout_s": None,
        "policy__generation__max_new_tokens": 6,
        "grpo__max_num_steps": NUM_STEPS,
        "data__validation": None,
        "checkpointing__save_period": 2,
        "checkpointing__metric_name": None,
        "checkpointing__resume": "auto",
        "checkpointing__checkpoint_dir": folder / "checkpoints",
        **sft_runs.only_jsonl(),
    }
    return grpo_runs.command(grpo_runs.settings(folder, data, **changes | more), exemplar)


def run_to_the_end(folder: Path, words: list[str]) -> str:
    with run_kills.running(words, folder) as run:
        assert run.wait_for_end(START_LIMIT_S + END_LIMIT_S) == 0, run.printed + run.errors
        return run.printed


@pytest.mark.slow
@pytest.mark.parametrize("how", ["await", "block", "thread"])
def test_a_request_to_stop_keeps_all_steps_that_are_done(how: str, tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 24)
    unharmed, faulty = tmp_path / "unharmed", tmp_path / "faulty"
    run_to_the_end(unharmed, command(unharmed, data))
    with run_kills.running(command(faulty, data), faulty) as run:
        run.wait_for_text("step 2/", START_LIMIT_S)
        (faulty / grpo_runs.HANG_FILE).write_text(how)
        run.wait_for_text("rollouts: no progress for ", START_LIMIT_S)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_for_end(END_LIMIT_S) == 0, run.printed + run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)  # a thread that hangs is left behind, and the watcher clears away
        printed = run.printed
    (faulty / grpo_runs.HANG_FILE).unlink()
    metrics = sft_runs.only_run_folder(faulty) / METRICS_FILE_NAME
    last = read_metrics(metrics)[-1].step
    assert 2 <= last < NUM_STEPS
    assert "warning: SIGTERM: rollouts are given up, as no trajectory has made progress for 10 s; waited for" in printed
    assert (
        f"stopped after step {last} of {NUM_STEPS} (SIGTERM); saved to {faulty / f'checkpoints/step_{last}'}" in printed
    )
    assert "Traceback" not in printed

    assert f"step_{last}" in run_to_the_end(faulty, command(faulty, data)), "it goes on from there"
    names = sorted(path.name for path in (unharmed / "checkpoints/final").glob("*.safetensors"))
    assert names
    for name in names:
        expected, found = (folder / "checkpoints/final" / name for folder in (unharmed, faulty))
        assert found.read_bytes() == expected.read_bytes(), "the weights of a run that nothing happened to"


def asynchronous(folder: Path, data: Path) -> list[str]:
    exemplar = grpo_runs.EXEMPLAR.with_name("grpo_tiny_moe_async_separate.yaml")
    one_worker = {"cluster__cpu_workers_per_node": 1, "cluster__roles__generation__cpu_workers_per_node": 1}
    return command(folder, data, exemplar, **one_worker, checkpointing__save_period=1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["await", "block", "thread"])
def test_an_asynchronous_run_ends_after_the_same_limit_and_goes_on(how: str, tmp_path: Path) -> None:
    data = grpo_runs.make_prompts(tmp_path / "data", 24)
    words = asynchronous(tmp_path, data)
    with run_kills.running(words, tmp_path) as run:
        run.wait_for_text("step 2/", START_LIMIT_S)
        (tmp_path / grpo_runs.HANG_FILE).write_text(how)
        run.wait_for_text("rollouts: no progress for ", START_LIMIT_S)
        run.process.send_signal(signal.SIGTERM)
        code = run.wait_for_end(END_LIMIT_S)
        run.wait_until_nothing_runs(END_LIMIT_S)
        printed, errors = run.printed, run.errors
    (tmp_path / grpo_runs.HANG_FILE).unlink()
    assert "Traceback" not in printed + errors
    assert code == 0, errors
    assert "SIGTERM: rollouts are given up, as no trajectory has made progress for 10 s; waited for " in printed
    run_folder = sft_runs.only_run_folder(tmp_path)
    assert 2 <= read_metrics(run_folder / METRICS_FILE_NAME)[-1].step < NUM_STEPS
    run_to_the_end(tmp_path, words)
    assert [record.step for record in read_metrics(run_folder / METRICS_FILE_NAME)][-1] == NUM_STEPS
    positions = [group.position for step in read_schedule(run_folder / SCHEDULE_FILE) for group in step.groups]
    assert sorted(positions) == list(range(4 * NUM_STEPS)), "each prompt once"

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs whose tools or agents are under way when something is killed: nothing runs or listens afterwards."""

import signal
from pathlib import Path

import pytest

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from tests.functional import drill_runs, grpo_runs, run_kills, sft_runs
from tests.functional.drill_moments import Notes, last_step, victims_of
from tests.functional.test_agent_run import settings as agent_settings
from tests.support.agents_of_tests import MARK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
START_LIMIT_S, END_LIMIT_S, COMPLETION_LIMIT_S = 400.0, 200.0, 900.0
NUM_STEPS = 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_is_ended_while_agents_hang(number: signal.Signals, tmp_path: Path) -> None:
    hanging = agent_settings(
        tmp_path, env__driver__program="tests.support.agents_of_tests:hangs_with_a_child", env__reward_weights=None
    )
    with run_kills.running(grpo_runs.command(hanging), tmp_path / "work") as run:
        run.wait_for_text("rollouts: no progress for ", START_LIMIT_S)
        children = [process for process in run.family() if MARK in process.cmdline()]
        assert len(children) == 3, "one of each agent that runs"
        ports = run.ports()
        assert ports
        run.process.send_signal(number)
        run.wait_for_end(END_LIMIT_S)
        run.wait_until_nothing_runs(END_LIMIT_S)
    assert not sft_runs.running(children)
    assert not run_kills.ports_in_use(ports)


@pytest.mark.parametrize(
    ("kind", "failures"), [("grpo_tools", "train/tools/failed_calls"), ("grpo_agent", "train/env/num_died")]
)
def test_a_tool_or_an_agent_that_is_killed_costs_its_trajectory_alone(kind: str, failures: str, tmp_path: Path) -> None:
    what = drill_runs.KINDS[kind]
    notes = Notes(tmp_path / "scoring", tmp_path / "calling")
    for folder in (notes.scoring, notes.calling):
        folder.mkdir()
    command = what.command(tmp_path, drill_runs.make_inputs(tmp_path / "inputs"), NUM_STEPS)
    with run_kills.running(command, tmp_path / "work", notes.environment()) as run:
        run.wait_for(lambda: last_step(run) >= 1, START_LIMIT_S)
        callers = victims_of(run, what.caller, notes)
        run.wait_for(lambda: any(notes.is_calling([each]) for each in callers), START_LIMIT_S, 0.01)
        next(each for each in callers if notes.is_calling([each])).kill()
        ports = run.ports()
        assert run.wait_for_end(COMPLETION_LIMIT_S) == 0, run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
    assert not run_kills.ports_in_use(ports)
    records = read_metrics(sft_runs.only_run_folder(tmp_path) / METRICS_FILE_NAME)
    steps = [record.metrics for record in records if "train/loss" in record.metrics]
    assert len(steps) == NUM_STEPS
    assert sum(metrics.get(failures, 0.0) for metrics in steps) > 0

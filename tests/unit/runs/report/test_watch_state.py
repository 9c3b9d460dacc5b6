# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory, ExpertLoadWriter
from nemo_rl_moe.runs.folder.routing import RoutingWriter
from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.report.run_findings import episodes_of, findings_of
from nemo_rl_moe.runs.report.watch_state import RunWatcher, WatchedRun
from tests.support.made_runs import make_run, random_counts, routing_report, routing_report_metrics

ALERTS = {"dead_expert_steps": 3, "excess_cv": 0.5, "overload_factor": 1.5, "sustained_steps": 2}
CONFIG = {"sft": {"max_num_steps": 30}, "logger": {"alerts": ALERTS}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", {}, config=CONFIG)


def write_step(folder: Path, step: int, metrics: Mapping[str, Any], counts: NDArray[np.int64] | None = None) -> None:
    """Write a step as a run does: the load first; a step takes two seconds."""
    if counts is not None:
        writer = ExpertLoadWriter(folder, print)
        writer.write(step, ExpertLoad(tuple(range(len(counts))), torch.from_numpy(counts.copy())))
        writer.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 100.0 + 2 * step, "metrics": metrics}) + "\n")


def sick_counts() -> NDArray[np.int64]:
    """Return counts of 20 steps; an expert is dead from step 5 to 9 and from step 14 on."""
    counts = random_counts(20, 2, 8, 400)
    counts[4:9, 1, 3] = counts[13:, 1, 3] = 0
    return counts


def load_of(run: WatchedRun) -> ExpertLoadHistory:
    assert run.load is not None
    return run.load


def metrics_of(step: int) -> dict[str, float]:
    return {"train/loss": 1 / step, "train/moe/avg_overload_factor": 2.0 if 7 <= step < 11 else 1.0}


@pytest.mark.parametrize("steps_at_a_time", [1, 3, 20])
def test_findings_are_those_of_the_report_however_the_run_is_read(folder: Path, steps_at_a_time: int) -> None:
    write_step(folder, 0, {"val/loss": 3.0})
    watcher = RunWatcher(folder)
    for step, counts in enumerate(sick_counts(), start=1):
        write_step(folder, step, metrics_of(step), counts)
        if step % steps_at_a_time == 0:
            watcher.look()
    run = watcher.look()
    expected = findings_of(read_run(folder))
    assert len(expected) == 2
    assert list(run.episodes) == episodes_of(expected)


def test_loads_that_come_behind_the_metrics_of_their_steps_are_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)  # steps of this minute: more may come
    watcher, writer = RunWatcher(folder), ExpertLoadWriter(folder, print, max_delay_s=1e9)
    for step, counts in enumerate(sick_counts(), start=1):
        writer.write(step, ExpertLoad((0, 1), torch.from_numpy(counts.copy())))
        write_step(folder, step, metrics_of(step))
        if step in (1, 4, 12):  # the first step's are written at once
            assert load_of(watcher.look()).steps.tolist() == [1]
    writer.close()
    run = watcher.look()
    assert load_of(run).steps.tolist() == [20]
    assert list(run.episodes) == episodes_of(findings_of(read_run(folder)))


def test_what_is_shown_is_what_the_run_wrote(folder: Path) -> None:
    counts = sick_counts()
    for step in range(1, 6):
        write_step(folder, step, metrics_of(step) | {"timing/train/tokens_per_second": 10.0 * step}, counts[step - 1])
    run = RunWatcher(folder).look()
    assert run.step == 5
    assert run.series["train/loss"] == [(step, 1 / step) for step in range(1, 6)]
    assert (run.seconds_per_step, run.tokens_per_second) == (2.0, 50.0)
    assert run.last_time - run.first_time == 8.0
    load = load_of(run)
    assert (load.steps.tolist(), load.layers.tolist()) == ([5], [0, 1])
    np.testing.assert_array_equal(load.counts, counts[4:5])


def test_a_resumed_run_is_taken_from_where_it_goes_on(folder: Path) -> None:
    counts = sick_counts()
    for step in range(1, 9):
        write_step(folder, step, metrics_of(step), counts[step - 1])
    watcher = RunWatcher(folder)
    assert {episode.latest.kind for episode in watcher.look().episodes} == {"dead_experts", "overload"}
    rewind_run_folder(folder, 4)
    run = watcher.look()
    assert (run.step, run.episodes, run.load and run.load.steps.tolist()) == (4, [], [4])
    write_step(folder, 5, {"train/loss": 9.0}, counts[0])
    run = watcher.look()
    assert run.series["train/loss"] == [*((step, 1 / step) for step in range(1, 5)), (5, 9.0)]
    np.testing.assert_array_equal(load_of(run).counts, counts[:1])


def test_loads_from_before_a_resumption_are_not_taken(folder: Path) -> None:
    counts = sick_counts()
    for step in range(1, 6):
        write_step(folder, step, metrics_of(step), counts[step - 1])
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    watcher = RunWatcher(folder)
    assert load_of(watcher.look()).steps.tolist() == [2]
    rewind_run_folder(folder, 2)
    write_step(folder, 3, {"train/loss": 9.0}, counts[10])
    np.testing.assert_array_equal(load_of(watcher.look()).counts, counts[10:11])


def test_a_run_that_has_not_written_yet_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    watcher = RunWatcher(folder)
    assert watcher.look().step is None
    assert watcher.look().described.planned_steps is None
    folder.rmdir()
    make_run(folder, {}, config=CONFIG, in_force={"moe_router_topk": 2, "moe_router_force_hot_rank": 1})
    assert watcher.look().described.planned_steps == 30
    write_step(folder, 1, {"train/loss": 1.0}, sick_counts()[0])
    run = watcher.look()
    assert run.step == 1
    assert [episode.latest.kind for episode in run.episodes] == ["forced_routing"]


def test_what_cannot_be_read_is_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {}, sick_counts()[:3])
    (folder / "expert_load.parquet" / "steps-00000002-00000002.parquet").write_bytes(b"PAR1")
    (folder / "effective_moe_configuration.json").write_text("{")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    write_step(folder, 3, {"train/loss": 1.0})
    run = RunWatcher(folder).look()
    assert run.step == 3
    settings, lines, load = run.notes
    assert "effective_moe_configuration.json: cannot be read" in settings
    assert lines == "metrics.jsonl: lines that are no records: 1"
    assert "steps-00000002-00000002.parquet: cannot be read" in load


LATE = RoutingAnomaly("token", "routes are one token late")


def write_capture_step(
    folder: Path, step: int, anomalies: Sequence[RoutingAnomaly] = (), *, ends: bool = False
) -> None:
    """Write a step as a GRPO run does: the capture first; a run that ends by it has no record of the step."""
    report = routing_report([step, 0], anomalies=anomalies)
    writer = RoutingWriter(folder, print)
    writer.write(step, report)
    writer.close()
    if not ends:
        write_step(folder, step, {"train/loss": 1.0, **routing_report_metrics(report)})


@pytest.mark.parametrize("steps_at_a_time", [1, 4])
@pytest.mark.parametrize("ends", [False, True])
def test_the_capture_is_taken_as_the_report_takes_it(folder: Path, steps_at_a_time: int, ends: bool) -> None:
    watcher = RunWatcher(folder)
    for step in range(1, 9):
        write_capture_step(folder, step, [LATE] * (step in (3, 8)), ends=ends and step == 8)
        if step % steps_at_a_time == 0:
            run = watcher.look()
    expected = findings_of(read_run(folder))
    assert [(found.kind, found.first_step, found.last_step, found.is_over) for found in expected] == [
        ("routes_of_another_token", 3, 8, False)
    ]
    assert list(run.episodes) == episodes_of(expected)
    assert run.num_wrong_steps == 2
    last = 7 if ends else 8
    assert run.routing["train/moe/routing/live_agreement"] == pytest.approx(1 - last / 78)


def test_anomalies_that_are_seen_before_their_step_are_counted_once(folder: Path) -> None:
    write_capture_step(folder, 1)
    watcher = RunWatcher(folder)
    watcher.look()
    report = routing_report([0], anomalies=[LATE])
    RoutingWriter(folder, print).write(2, report)
    assert [episode.latest.is_over for episode in watcher.look().episodes] == [False]
    write_step(folder, 2, {"train/loss": 1.0, **routing_report_metrics(report)})
    run = watcher.look()
    assert (run.num_wrong_steps, [episode.latest.is_over for episode in run.episodes]) == (1, [False])


def test_a_run_that_goes_on_behind_wrong_routes_forgets_them(folder: Path) -> None:
    for step in range(1, 4):
        write_capture_step(folder, step, [LATE] * (step == 3), ends=step == 3)
    watcher = RunWatcher(folder)
    assert len(watcher.look().episodes) == 1
    rewind_run_folder(folder, 2)
    run = watcher.look()
    assert (run.step, run.episodes, run.num_wrong_steps) == (2, [], 0)


def test_damaged_anomalies_are_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 1.0}}, config=CONFIG)
    (folder / "routing_anomalies.jsonl").write_text("{}\n")
    assert RunWatcher(folder).look().notes == ["routing_anomalies.jsonl: lines that are no records: 1"]
    assert read_run(folder).notes == [f"{folder}/routing_anomalies.jsonl: lines that are no anomalies: 1"]

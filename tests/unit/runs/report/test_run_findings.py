# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np

from nemo_rl_moe.config.loading import dump_resolved, load_config
from nemo_rl_moe.routing.findings.tracker import Finding, Thresholds
from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.report.run_findings import episodes_of, findings_of, thresholds_of
from tests.support.made_runs import THRESHOLDS, make_run, random_counts

ALERTS = {"enabled": False, "dead_expert_steps": None, "excess_cv": 0.25, "overload_factor": 3, "sustained_steps": 4}


def test_thresholds_are_those_of_the_run() -> None:
    assert thresholds_of({"logger": {"alerts": ALERTS}}) == Thresholds(None, 0.25, 3, 4, 5, 0.001, 5, 2, 0.01, 3)


def test_thresholds_that_a_run_lacks_are_the_shipped_ones() -> None:
    shipped = load_config("sft_tiny_moe.yaml", [], check_paths=False)
    expected = thresholds_of(dump_resolved(shipped))
    assert expected.dead_expert_steps is not None
    assert thresholds_of({}) == thresholds_of({"logger": {"alerts": {}}}) == expected


def test_findings_of_the_whole_history(tmp_path: Path) -> None:
    counts = random_counts(8, 2, 8, 400)
    counts[2:, 1, 5] = 0
    metrics = {step: {"train/moe/avg_overload_factor": 2.0 if step in (4, 5) else 1.0} for step in range(1, 9)}
    findings = findings_of(read_run(make_run(tmp_path / "run", metrics, counts, layers=[1, 4])), THRESHOLDS)
    assert [(found.kind, found.layer, found.first_step, found.last_step) for found in findings] == [
        ("dead_experts", 4, 3, 8),
        ("overload", None, 4, 5),
    ]


def test_steps_that_teach_nothing_are_found_too(tmp_path: Path) -> None:
    idle = {"train/advantages/min": 0.0, "train/advantages/max": 0.0, "train/reward": 1.0, "train/truncation_rate": 1.0}
    findings = findings_of(read_run(make_run(tmp_path / "run", dict.fromkeys(range(1, 9), idle))))
    assert {(found.kind, found.first_step, found.last_step) for found in findings} == {
        ("no_advantages", 1, 8),
        ("all_truncated", 1, 8),
    }


def test_random_routing_has_none_by_the_shipped_thresholds(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", {}, random_counts(40, 2, 8, 400)))
    assert findings_of(run) == []


def test_forced_routing_is_a_finding_whatever_the_numbers_are(tmp_path: Path) -> None:
    in_force = {"moe_router_force_load_balancing": False, "moe_router_force_biased": None, "moe_router_topk": 2}
    metrics = {step: {"train/loss": 1.0} for step in range(1, 4)}
    free = read_run(make_run(tmp_path / "free", metrics, in_force=in_force))
    assert findings_of(free) == []
    hot = read_run(make_run(tmp_path / "hot", metrics, in_force=in_force | {"moe_router_force_hot_rank": 0}))
    (finding,) = findings_of(hot)
    assert (finding.kind, finding.first_step, finding.last_step) == ("forced_routing", 1, 3)
    assert finding.text.startswith("forced routing: moe_router_force_hot_rank is 0;")


def test_episodes_are_reported_in_one_line() -> None:
    def finding(layer: int | None, first: int, last: int, is_over: bool) -> Finding:
        return Finding("imbalance" if layer is not None else "overload", layer, first, last, is_over, "")

    episodes = episodes_of(
        [finding(3, 1, 5, True), finding(0, 2, 9, True), finding(3, 7, 20, False), finding(None, 8, 20, False)]
    )
    assert [(found.latest.layer, found.number, found.first_step) for found in episodes] == [
        (None, 1, 8),
        (3, 2, 1),
        (0, 1, 2),
    ]


def test_loads_without_metrics_are_watched_too(tmp_path: Path) -> None:
    counts = np.tile(np.array([[[0, 300, 300, 300]]]), (5, 1, 1))
    findings = findings_of(read_run(make_run(tmp_path / "run", {}, counts)), THRESHOLDS)
    assert {found.kind for found in findings} == {"dead_experts", "imbalance"}

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Staleness in the report: a section of its own, what overlap gained against what lag cost, and what is found."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.report.charts import SECTIONS, charts_of
from nemo_rl_moe.runs.report.overlap import overlap_facts
from nemo_rl_moe.runs.report.page_data import page_data
from nemo_rl_moe.runs.report.run_findings import findings_of
from nemo_rl_moe.token_lag import LAG_CLASSES
from tests.support.made_runs import make_run
from tests.unit.test_docs_examples import DOCS, documented_keys
from tests.unit.test_docs_grpo_metrics import unfolded

STALENESS = SECTIONS["staleness"]
PAGES = ("staleness-metrics.md", "asynchronous-rollouts.md")
DOCUMENTED = {
    key.replace("{lag}", "2") for page in PAGES for cell in documented_keys(DOCS / page) for key in unfolded(cell)
}


def steps(
    number: int, *, waiting: float, effective: float, idle: float = 0.0, **more: float
) -> dict[int, Mapping[str, float]]:
    metrics = {
        "train/loss": 1.0,
        "train/by_lag/effective_samples": effective,
        "train/by_lag/mean_lag": 1.5,
        "train/by_lag/0/gen_kl_error": 0.001,
        "train/by_lag/3_to_4/gen_kl_error": 0.003,
        "train/by_lag/3_to_4/kl_staleness": 0.002,
        "train/rollouts/idle_share/engines": idle,
        "timing/step/seconds": 4.0,
        "timing/generation/seconds": 4.0 * waiting,
    }
    return {step: {**metrics, **more} for step in range(1, number + 1)}


@pytest.mark.parametrize("pattern", sorted({pattern for chart in STALENESS.charts for pattern in chart.lines}))
def test_every_line_is_a_documented_metric(pattern: str) -> None:
    assert [key for key in DOCUMENTED if fnmatchcase(key, pattern)]


def test_lines_are_the_classes_and_other_runs_have_no_such_section() -> None:
    keys = [f"train/by_lag/{name}/effective_samples" for name in LAG_CLASSES]
    charts = charts_of([*keys, "train/by_lag/effective_samples", "train/loss"])
    assert [line["label"] for line in charts[0]["lines"]] == ["all", *LAG_CLASSES]
    assert charts[0]["section"] == STALENESS.heading
    plain = charts_of(["train/loss", "train/reward", "train/moe/routing/live_agreement"])
    assert STALENESS.heading not in {chart["section"] for chart in plain}


def test_the_page_sets_what_overlap_gained_against_what_lag_cost(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps(3, waiting=0.25, effective=0.9, idle=0.35)))
    facts = [
        ("training waits for rollouts", "25% of the time"),
        ("engines idle", "35%"),
        ("speedup by overlap", "at most 1.40"),
        ("effective samples", "90%"),
        ("overlap", "pays"),
    ]
    assert overlap_facts(run) == facts
    (described,) = json.loads(page_data([run], 1_000_000).text)["runs"]
    assert [(fact["label"], fact["value"]) for fact in described["latest"]][-5:] == facts
    assert findings_of(run) == []


def test_the_last_steps_alone_decide(tmp_path: Path) -> None:
    made = steps(30, waiting=0.0, effective=1.0)
    made |= {step: of for step, of in steps(30, waiting=0.5, effective=0.5).items() if step > 10}
    assert dict(overlap_facts(read_run(make_run(tmp_path / "run", made))))["overlap"] == "costs more than it gains"


def test_a_synchronous_run_has_no_such_line(tmp_path: Path) -> None:
    made = {1: {"train/loss": 1.0, "timing/step/seconds": 4.0, "timing/generation/seconds": 3.0}}
    assert overlap_facts(read_run(make_run(tmp_path / "run", made))) == []


def test_an_unbounded_loss_that_met_a_lag_of_three_is_found_again(tmp_path: Path) -> None:
    made = steps(2, waiting=0.25, effective=0.9, **{"train/by_lag/max_unbounded_lag": 3.0})
    assert [found.kind for found in findings_of(read_run(make_run(tmp_path / "run", made)))] == ["unbounded_staleness"]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`environment_failures.jsonl`, and the lines, findings and terminal view that are made of it."""

import json
from pathlib import Path

import pytest

from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.runs.folder.failures import FAILURES_FILE_NAME, FailuresTail, FailureWriter, failures_of
from nemo_rl_moe.runs.folder.line_tail import by_step
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME
from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.report.run_findings import findings_of, scoring_lines
from nemo_rl_moe.runs.report.watch_state import RunWatcher
from tests.support.grpo_fakes import trajectory
from tests.support.made_runs import make_run

SIX = FailedResponses("train", 6, 16, "ValueError: even (sample grpo.jsonl:3)")
ONE = FailedResponses("train", 1, 16, "took longer than 1 s (sample grpo.jsonl:9)")
OF_VALIDATION = FailedResponses("val", 2, 8, "ValueError: even (sample val.jsonl:1)")
TEXT = (
    "1 of 16 responses (6%) could not be scored at step 3; the first at step 2: ValueError: even (sample grpo.jsonl:3)"
)


def run_with_failures(folder: Path) -> Path:
    constant = {"train/loss": 1.0, "train/rewards/format/mean": 0.0, "train/rewards/format/std": 0.0}
    return make_run(folder, dict.fromkeys(range(1, 7), constant), failures={2: [SIX, OF_VALIDATION], 3: [ONE]})


def test_failures_are_summed_up_by_split() -> None:
    responses = [trajectory(), trajectory(fault=Fault.ERROR, sample_id="a:1"), trajectory(fault=Fault.DIED)]
    assert failures_of({"train": responses, "val": [trajectory()]}) == [
        FailedResponses("train", 2, 3, "it broke (sample a:1)")
    ]


def test_they_are_kept_with_their_step_and_rewound(tmp_path: Path) -> None:
    folder = run_with_failures(tmp_path / "run")
    assert by_step(FailuresTail(folder).read().records) == {2: [SIX, OF_VALIDATION], 3: [ONE]}
    rewind_run_folder(folder, 2)
    assert by_step(FailuresTail(folder).read().records) == {2: [SIX, OF_VALIDATION]}


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": "2"},
        {"split": "test"},
        {"failed": 0},
        {"failed": 17},
        {"failed": 0.5},
        {"responses": True},
        {"first": None, "step": None},
    ],
)
def test_damaged_lines_are_counted(changes: dict[str, object], tmp_path: Path) -> None:
    good = {"step": 2, "split": "train", "failed": 6, "responses": 16, "first": SIX.first}
    folder = make_run(tmp_path / "run", {1: {"train/loss": 1.0}})
    (folder / FAILURES_FILE_NAME).write_text(f"{json.dumps(good | changes)}\n{json.dumps(good)}\n{{")
    found = FailuresTail(folder).read()
    assert (by_step(found.records), found.num_damaged) == ({2: [SIX]}, 1)
    assert read_run(folder).notes == [f"{folder}/{FAILURES_FILE_NAME}: lines that are no failures: 1"]
    assert RunWatcher(folder).look().notes == [f"{FAILURES_FILE_NAME}: lines that are no records: 1"]


def test_report_and_terminal_view_have_the_same_findings(tmp_path: Path) -> None:
    folder = run_with_failures(tmp_path / "run")
    findings = findings_of(read_run(folder))
    assert [(found.kind, found.first_step, found.last_step) for found in findings] == [
        ("constant_reward", 1, 6),
        ("failed_responses", 2, 3),
    ]
    assert findings[1].text == TEXT
    watched = [episode.latest for episode in RunWatcher(folder).look().episodes]
    assert sorted(watched, key=lambda found: found.kind) == findings


def test_the_terminal_view_waits_for_the_step_of_a_failure(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 1.0}})
    watcher = RunWatcher(folder)
    writer = FailureWriter(folder, pytest.fail, pytest.fail)
    writer.write(2, SIX)
    assert watcher.look().episodes == []
    with (folder / METRICS_FILE_NAME).open("a") as file:
        record = json.loads((folder / METRICS_FILE_NAME).read_text().splitlines()[-1])
        file.write(json.dumps(record | {"step": 2}) + "\n")
    assert [episode.latest.kind for episode in watcher.look().episodes] == ["failed_responses"]
    writer.close()


def test_lines_at_the_end_of_a_run(tmp_path: Path) -> None:
    assert scoring_lines(run_with_failures(tmp_path / "run")) == [
        "  warning: 7 responses could not be scored, 22% of all in 2 steps; the first at step 2: ValueError: even"
        " (sample grpo.jsonl:3)",
        "  warning: 2 responses of validations could not be scored, 25% of all in 1 step; the first at step 2:"
        " ValueError: even (sample val.jsonl:1)",
        "  warning: the reward 'format' has been 0 in every response since step 1: it distinguishes no responses",
    ]
    # A healthy run has no such file, and no warning.
    healthy = make_run(tmp_path / "healthy", {1: {"train/loss": 1.0, "train/reward": 0.5, "train/reward_std": 0.5}})
    assert scoring_lines(healthy) == ["  reward of step 1: 0.5000"]
    learning = make_run(tmp_path / "learning", {step: {"train/reward": step / 4} for step in (1, 2, 3)})
    assert scoring_lines(learning) == ["  reward of steps 1 and 3: 0.2500 -> 0.7500"]
    assert not (healthy / FAILURES_FILE_NAME).exists()
    assert scoring_lines(tmp_path) == []

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.runs.folder.saved_samples import (
    LONGEST_TEXT,
    PROMPTS_OF_A_STEP,
    STEPS_OF_A_SPLIT,
    read_samples,
    shortened,
)
from tests.support.made_runs import make_run


def sample(step: int, split: str, prompt: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "split": split,
        "sample_id": f"file:{prompt}",
        "prompt": f"{prompt}+1=",
        "response": f"{prompt + 1}",
        "is_truncated": False,
        "reward": 1.0,
        "is_correct": True,
        "fault": None,
    } | changes


def test_some_steps_and_prompts_are_chosen_validation_first(tmp_path: Path) -> None:
    lines = [
        sample(step, split, prompt)
        for step in range(1, 31)
        for split in ("train", "val")
        for prompt in range(20)
        for _ in range(2)
    ]
    notes: list[str] = []
    found = read_samples(make_run(tmp_path / "run", {}, samples=lines), notes)
    assert len(found) == 2 * STEPS_OF_A_SPLIT * PROMPTS_OF_A_STEP
    assert [one["split"] for one in found] == ["val"] * (len(found) // 2) + ["train"] * (len(found) // 2)
    validation = found[: len(found) // 2]
    assert sorted({one["step"] for one in validation})[-1] == 30
    assert [one["sample_id"] for one in validation[:6]] == [one["sample_id"] for one in validation[-6:]]
    assert notes == []


def test_verdicts_and_rewards(tmp_path: Path) -> None:
    lines = [
        sample(1, "val", 1),
        sample(1, "val", 2, is_correct=False, reward=0.25),
        sample(1, "val", 3, is_correct=False, is_truncated=True, reward=0),
        sample(1, "val", 4, fault="timeout: 5 s", reward=None, is_correct=None),
        sample(1, "val", 5, reward="NaN", response="x" * (LONGEST_TEXT + 1)),
    ]
    found = read_samples(make_run(tmp_path / "run", {}, samples=lines), [])
    assert [(one["verdict"], one["reward"]) for one in found] == [
        ("right", "1"),
        ("wrong", "0.25"),
        ("truncated", "0"),
        ("timeout: 5 s", ""),
        ("right", ""),
    ]
    assert found[-1]["response"] == "x" * LONGEST_TEXT + " [...]"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param("[]\nnothing\n\n" + json.dumps(sample(2, "val", 1))[:-20], id="none, and a cut one"),
        pytest.param('{"step": 1e400, "split": "val"}\n' + "[" * 100_000 + "\n", id="numbers and nesting"),
    ],
)
def test_lines_that_are_none_are_counted_and_a_cut_one_is_not(lines: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {}, samples=[sample(1, "val", 1)])
    with (folder / "samples.jsonl").open("a") as file:
        file.write(lines)
    notes: list[str] = []
    assert len(read_samples(folder, notes)) == 1
    assert notes == [f"{folder / 'samples.jsonl'}: lines that are no samples: 2"]


def test_texts_that_are_cut_twice_say_so_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {}, samples=[sample(1, "val", 1, response="x" * 3000)])
    (found,) = shortened(read_samples(folder, []), 1000)
    assert found["response"] == "x" * 1000 + " [...]"
    (found,) = shortened([{"response": "x" * 10 + " [...]"}], 10)
    assert found["response"] == "x" * 10 + " [...]"


def test_a_run_without_samples(tmp_path: Path) -> None:
    assert read_samples(make_run(tmp_path / "run", {}), []) == []

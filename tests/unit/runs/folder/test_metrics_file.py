# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl` stays valid JSON, survives a crash, and reads back."""

import json
import math
import time
from pathlib import Path

import pytest

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.metrics import JsonlLogger, StepRecord, read_metrics


def refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def test_lines_are_strict_json_and_read_back(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, pytest.fail, pytest.fail)
    values = {"train/loss": 0.1, "train/nan": math.nan, "train/up": math.inf, "train/down": -math.inf, "train/n": 3}
    before = time.time()
    logger.log_step(7, values)
    logger.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=refuse)
    assert text.endswith("\n")
    assert line["step"] == 7
    assert before <= line["time"] <= time.time()
    assert line["metrics"] == {
        "train/loss": 0.1,
        "train/nan": "NaN",
        "train/up": "Infinity",
        "train/down": "-Infinity",
        "train/n": 3.0,
    }
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record.metrics.pop("train/nan"))
    assert record == StepRecord(
        7, line["time"], {"train/loss": 0.1, "train/up": math.inf, "train/down": -math.inf, "train/n": 3.0}
    )


def test_every_cut_of_the_last_line_leaves_the_lines_before_it(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, pytest.fail, pytest.fail)
    for step in (1, 2):
        logger.log_step(step, {"train/loss": 0.5})
    logger.close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first_end = whole.index(b"\n") + 1
    for cut in range(first_end, len(whole)):
        path.write_bytes(whole[:cut])
        assert [record.step for record in read_metrics(path)] == [1]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"step": 1}',
        '{"step": 1, "time": 2, "metrics": {"a": "x"}}',
        '{"step": 1e400, "time": 2, "metrics": {}}',
        '{"step": -1, "time": 2, "metrics": {}}',
        '{"step": 9223372036854775808, "time": 2, "metrics": {}}',
        '{"step": 1, "time": NaN, "metrics": {}}',
        '{"step": 1, "time": 2, "metrics": {"a": 1' + "0" * 400 + "}}",
    ],
)
def test_a_broken_line_that_is_not_the_last_names_file_and_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "time": 2.0, "metrics": {}}'
    path.write_text(f"{good}\n{bad}\n{good}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a step record"):
        read_metrics(path)


def test_metrics_of_older_runs_have_their_names_of_today(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0, "metrics": {"train/moe/routing/tape_bytes": 5}}\n')  # older name
    (record,) = read_metrics(path)
    assert record.metrics == {"train/moe/routing/captured_bytes": 5.0}

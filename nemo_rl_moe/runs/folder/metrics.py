# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl`, one JSON object per step: its writer and readers."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.runs.folder.line_tail import NO_RECORD, LineTail
from nemo_rl_moe.runs.folder.lines import LineFile

RunOutcome = Literal["finished", "failed", "killed"]
MetricHistory = dict[str, list[tuple[int, float]]]
"""Metrics of a run: full key -> pairs `(step, value)`, in ascending order of steps."""
METRICS_FILE_NAME = "metrics.jsonl"
RENAMED_METRICS = {
    "train/moe/routing/tape_bytes": "train/moe/routing/captured_bytes"  # older name
}
"""Key in files of older runs -> its present name."""
LAST_STEP = 10**8 - 1
_LAST_SECOND = 253_402_300_799  # of the year 9999


@dataclass(frozen=True)
class StepRecord:
    step: int
    time: float
    metrics: dict[str, float]


class JsonlLogger:
    """Logger that appends `{"step": 1, "time": 1.7e9, "metrics": {"train/loss": 0.5}}` to `<run folder>/metrics.jsonl`.

    Each line is passed to the operating system before `log_step` returns, so a crash of the program loses no step. On a
    full disk, lines wait in memory (`LineFile`). JSON has no NaN and infinities. They become the strings `"NaN"`,
    `"Infinity"` and `"-Infinity"`, which Python's `float()`, pandas' `to_numeric` and JavaScript's `Number()` can read.
    """

    name = "jsonl"

    def __init__(self, run_folder: Path, warn: Callable[[str], None], message: Callable[[str], None]):
        self._lines = LineFile(run_folder / METRICS_FILE_NAME, warn, message)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step, "time": time.time(), "metrics": {key: json_number(v) for key, v in metrics.items()}}
        self._lines.append([json.dumps(record, allow_nan=False)])

    def flush_to_disk(self) -> bool:
        return self._lines.flush_to_disk()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Do nothing: the run folder holds the configuration as `config.yaml`."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        self._lines.close()


def read_metrics(path: Path) -> list[StepRecord]:
    """Return the records of a `metrics.jsonl`, during the run or afterwards."""
    lines = path.read_bytes().split(b"\n")
    # After the last line feed there may be an incomplete line, of a run that writes or was killed. It is skipped.
    return [parse_record(line, f"{path}:{number}") for number, line in enumerate(lines[:-1], start=1) if line.strip()]


def read_history(path: Path) -> MetricHistory:
    """Return the metrics of a `metrics.jsonl` by key."""
    return metric_history(read_metrics(path))


def metric_history(records: Iterable[StepRecord]) -> MetricHistory:
    history: MetricHistory = {}
    for record in records:
        for key, value in record.metrics.items():
            history.setdefault(key, []).append((record.step, value))
    return history


class MetricsTail(LineTail[StepRecord]):
    """Reader of the `metrics.jsonl` of a running run."""

    def __init__(self, path: Path):
        super().__init__(path, _step_record)


def parse_record(line: bytes, place: str) -> StepRecord:
    """Return the record in a line of a `metrics.jsonl`. `place` names the line in errors."""
    try:
        return _step_record(json.loads(line))
    except NO_RECORD as error:
        raise DataError(f'{place}: not a step record {{"step", "time", "metrics"}}: {one_line(error)}') from error


def _step_record(record: Any) -> StepRecord:
    metrics = {RENAMED_METRICS.get(key, str(key)): float(value) for key, value in record["metrics"].items()}
    step, seconds = int(record["step"]), float(record["time"])
    if not (0 <= step <= LAST_STEP and 0 <= seconds <= _LAST_SECOND):
        raise ValueError("invalid step or time")
    return StepRecord(step, seconds, metrics)


def json_number(value: float) -> float | str:
    """Return a number that JSON can represent. NaN and infinities become strings that `float()` can read."""
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")

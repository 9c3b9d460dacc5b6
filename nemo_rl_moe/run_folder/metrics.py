# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl`: the run's own record, one JSON object a step, readable by anything."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.run_folder.lines import LineFile

RunOutcome = Literal["finished", "failed", "killed"]
METRICS_FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """One line of the file.

    Attributes:
        step: Optimizer steps taken so far.
        time: Unix seconds when the line was written.
        metrics: Complete key to value; NaN and infinities are floats again.
    """

    step: int
    time: float
    metrics: dict[str, float]


class JsonlLogger:
    """Appends `{"step": 1, "time": 1.7e9, "metrics": {"train/loss": 0.5}}` to `<run folder>/metrics.jsonl`.

    Each line is handed to the operating system before `log_step` returns, so a crash of the program loses no step;
    what a full disk does not take is kept and written later, as `LineFile` says. JSON knows no NaN and no infinity:
    they become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which Python's `float()`, pandas' `to_numeric` and
    JavaScript's `Number()` all turn back.

    Args:
        run_folder: An existing folder.
        warn: Shows a warning.
        message: Shows a line.
    """

    name = "jsonl"

    def __init__(self, run_folder: Path, warn: Callable[[str], None], message: Callable[[str], None]):
        self._lines = LineFile(run_folder / METRICS_FILE_NAME, warn, message)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line."""
        record = {"step": step, "time": time.time(), "metrics": {key: json_number(v) for key, v in metrics.items()}}
        self._lines.append([json.dumps(record, allow_nan=False)])

    def flush_to_disk(self) -> bool:
        """Waits until the disk has all lines; False where some cannot be written. May be called from any thread."""
        return self._lines.flush_to_disk()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing: the run folder holds the configuration as `config.yaml`."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Closes the file."""
        self._lines.close()


def read_metrics(path: Path) -> list[StepRecord]:
    """Reads a `metrics.jsonl` back, while the run goes on or after it.

    A last line without its end, which a crash can leave, is passed over.

    Raises:
        DataError: A line before the last one is not a step record; names the file and the line.
    """
    lines = path.read_bytes().split(b"\n")
    # What follows the last line feed is empty for a whole file, and the cut line for a broken one.
    return [parse_record(line, f"{path}:{number}") for number, line in enumerate(lines[:-1], start=1) if line.strip()]


def parse_record(line: bytes, place: str) -> StepRecord:
    """One line of the file.

    Args:
        line: With or without its line feed.
        place: Where it stands, for the error.

    Raises:
        DataError: It is no step record.
    """
    try:
        record = json.loads(line)
        metrics = {str(key): float(value) for key, value in record["metrics"].items()}
        return StepRecord(int(record["step"]), float(record["time"]), metrics)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f'{place}: not a step record {{"step", "time", "metrics"}}: {error!r}') from error


def json_number(value: float) -> float | str:
    """A number as JSON has it; NaN and infinities become text that `float()` turns back."""
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")

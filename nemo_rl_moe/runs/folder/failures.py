# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`environment_failures.jsonl`: a line for each step or validation with responses that could not be scored.

A line has the step, the split (`train` or `val`), the numbers of failed and of all responses, and the first cause. A
run without failures has no such file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.runs.folder.line_tail import LineTail, OfStep
from nemo_rl_moe.runs.folder.lines import LineFile
from nemo_rl_moe.runs.folder.metrics import LAST_STEP
from nemo_rl_moe.runs.folder.samples import SavedTrajectory

FAILURES_FILE_NAME = "environment_failures.jsonl"
_SPLITS = ("train", "val")
_LONGEST_TEXT = 1000


def failures_of(by_split: Mapping[str, Sequence[SavedTrajectory]]) -> list[FailedResponses]:
    """Return the number of responses without a score, and the first cause, for each split with such responses."""
    found = []
    for split, trajectories in by_split.items():
        failed = [each for each in trajectories if each.fault is not None]
        if failed:
            first = f"{failed[0].fault_message} (sample {failed[0].sample_id})"
            found.append(FailedResponses(split, len(failed), len(trajectories), first))
    return found


class FailureWriter:
    """Writer of a run's responses that could not be scored. The first such response creates the file."""

    def __init__(self, run_folder: Path, warn: Callable[[str], None], message: Callable[[str], None]):
        self._path, self._warn, self._message = run_folder / FAILURES_FILE_NAME, warn, message
        self._lines: LineFile | None = None

    def write(self, step: int, failed: FailedResponses) -> None:
        self._lines = self._lines or LineFile(self._path, self._warn, self._message)
        values = {"failed": failed.number, "responses": failed.responses, "first": failed.first}
        self._lines.append([json.dumps({"step": step, "split": failed.split, **values})])

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


class FailuresTail(LineTail[OfStep[FailedResponses]]):
    """Reader of the responses that could not be scored, of a running or finished run."""

    def __init__(self, run_folder: Path):
        super().__init__(run_folder / FAILURES_FILE_NAME, _parse)


def _parse(record: Any) -> OfStep[FailedResponses]:
    step, split, number, responses = (record[name] for name in ("step", "split", "failed", "responses"))
    numbers = (step, number, responses)
    if any(type(each) is not int for each in numbers) or not 0 <= step <= LAST_STEP or split not in _SPLITS:
        raise ValueError("invalid step, split or number")
    if not 1 <= number <= responses <= LAST_STEP:
        raise ValueError("more failed responses than responses")
    return OfStep(step, FailedResponses(split, number, responses, str(record["first"])[:_LONGEST_TEXT]))

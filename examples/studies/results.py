# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of a study's runs: their measures, and the file of a complete run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, MetricHistory, read_history

RESULT_FILE = "result.json"

Measures = Mapping[str, tuple[str, Callable[[Sequence[float]], float]]]
"""Name of a measure to its metric, and to the reduction of the metric's values over the steps."""


class StudyRun(Protocol):
    """One run of a study. Must be hashable."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        ...


RunT = TypeVar("RunT", bound=StudyRun)


def measures_of(history: MetricHistory, measures: Measures) -> dict[str, float]:
    """Return the measures of a run, as far as it logs their metrics."""
    return {
        name: float(reduce([value for _, value in history[key]]))
        for name, (key, reduce) in measures.items()
        if key in history
    }


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        seconds: Duration, without the start of Ray and of the engines.
        measures: Empty if the run diverged.
        diverged: Message of the error if the run diverged.
    """

    seconds: float
    measures: dict[str, float]
    diverged: str | None = None

    def write(self, folder: Path) -> None:
        """Write the file that marks a complete run."""
        content = {"seconds": self.seconds, "measures": self.measures, "diverged": self.diverged}
        write_whole(folder / RESULT_FILE, json.dumps(content, indent=1) + "\n")


def read_result(folder: Path) -> Result | None:
    """Return the result of a folder's run. None if the run is not complete.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / RESULT_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measures = {str(name): float(value) for name, value in content["measures"].items()}
        return Result(float(content["seconds"]), measures, content["diverged"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the outcome of a run; remove its folder to run it again: {error}") from None


def measured_again(folder: Path, result: Result, measures: Measures) -> Result:
    """Return a result with measures that may be newer than the run, if its metrics still exist."""
    found = sorted(folder.glob(f"*/{METRICS_FILE_NAME}"))
    if result.diverged is not None or not found:
        return result
    return replace(result, measures=measures_of(read_history(found[-1]), measures))


def read_results(runs_folder: Path, runs: Sequence[RunT]) -> dict[RunT, Result]:
    """Return the results of the complete runs."""
    found = {run: read_result(runs_folder / run.name) for run in runs}
    return {run: result for run, result in found.items() if result is not None}

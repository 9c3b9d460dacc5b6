# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Outcomes of a study's runs: what is measured of each, and the file that says that it is done."""

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
"""Name of a measure to its metric, and to what is taken of the metric's values over the steps."""


class StudyRun(Protocol):
    """One run of a study; hashable."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        ...


RunT = TypeVar("RunT", bound=StudyRun)


def measures_of(history: MetricHistory, measures: Measures) -> dict[str, float]:
    """Return the measures of a run; those whose metric it does not log are left out."""
    return {
        name: float(reduce([value for _, value in history[key]]))
        for name, (key, reduce) in measures.items()
        if key in history
    }


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        seconds: Duration, engines and Ray running already.
        measures: Its measures; empty for a run that diverged.
        diverged: Message of a run whose numbers were no longer numbers; None of any other.
    """

    seconds: float
    measures: dict[str, float]
    diverged: str | None = None

    def write(self, folder: Path) -> None:
        """Say in a run's folder that the run is done."""
        content = {"seconds": self.seconds, "measures": self.measures, "diverged": self.diverged}
        write_whole(folder / RESULT_FILE, json.dumps(content, indent=1) + "\n")


def read_result(folder: Path) -> Result | None:
    """Return the outcome of the run of a folder; None where it is not done.

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
    """Return an outcome with measures that may be newer than the run, from its metrics where they are still there."""
    found = sorted(folder.glob(f"*/{METRICS_FILE_NAME}"))
    if result.diverged is not None or not found:
        return result
    return replace(result, measures=measures_of(read_history(found[-1]), measures))


def read_results(runs_folder: Path, runs: Sequence[RunT]) -> dict[RunT, Result]:
    """Return the outcomes of those runs that are done."""
    found = {run: read_result(runs_folder / run.name) for run in runs}
    return {run: result for run, result in found.items() if result is not None}

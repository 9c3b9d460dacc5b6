# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures of a run, from the metrics that it has logged, and the file that says that it is done."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.routing_study.grid import Run
from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.metrics import MetricHistory

RESULT_FILE = "result.json"

MEASURES: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "accuracy at start": ("val/accuracy", lambda values: values[0]),
    "accuracy": ("val/accuracy", lambda values: values[-1]),
    "reward": ("train/reward", statistics.fmean),
    "mismatch, median step": ("train/gen_kl_error", statistics.median),
    "mismatch, worst step": ("train/gen_kl_error", max),
    "probability error": ("train/token_mult_prob_error", statistics.fmean),
    "probability error, worst step": ("train/token_mult_prob_error", max),
    "live agreement": ("train/moe/routing/live_agreement", statistics.fmean),
    "live agreement, first step": ("train/moe/routing/live_agreement", lambda values: values[0]),
    "agreement": ("train/moe/routing/agreement", statistics.fmean),
    "clipped below": ("train/clip_fraction_low", statistics.fmean),
    "clipped above": ("train/clip_fraction_high", statistics.fmean),
    "largest ratio": ("train/probs_ratio_max", max),
    "corrected, truncated": ("train/importance_weight_truncated_fraction", statistics.fmean),
    "corrected, dropped": ("train/importance_weight_dropped_fraction", statistics.fmean),
    "entropy, last step": ("train/approx_entropy", lambda values: values[-1]),
    "skipped updates": ("train/skipped_updates", sum),
}
"""Name to the metric, and to what is taken of its values over the steps."""


def measures_of(history: MetricHistory) -> dict[str, float]:
    """Return the measures of a run; those whose metric it does not log are left out."""
    return {
        name: float(reduce([value for _, value in history[key]]))
        for name, (key, reduce) in MEASURES.items()
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


Results = dict[Run, Result]


def read_results(runs_folder: Path, runs: Sequence[Run]) -> Results:
    """Return the outcomes of those runs that are done."""
    found = {run: read_result(runs_folder / run.name) for run in runs}
    return {run: result for run, result in found.items() if result is not None}

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables and image of the staleness study: means over seeds by lag, and differences from a method's lag 0."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from examples.staleness_study.grid import CORRECTIONS, LAGS, REPLAYS, Method
from examples.staleness_study.measures import MEASURES, Results
from examples.studies.intervals import (
    FEWEST_FOR_A_CLAIM,
    Interval,
    geometric,
    interval,
    paired_differences,
    shown,
)

PANELS = ("accuracy", "mismatch", "live agreement")
GEOMETRIC = ("mismatch",)
"""Measures that span powers of ten."""


def by_seed(results: Results, method: Method, lag: int, measure: str) -> dict[int, float]:
    """Return a measure of each run of a cell, except runs that diverged or lack it."""
    return {
        run.seed: result.measures[measure]
        for run, result in results.items()
        if (run.method, run.lag) == (method, lag) and measure in result.measures
    }


def difference(results: Results, method: Method, lag: int, measure: str = "accuracy") -> Interval | None:
    """Return the difference of a cell from lag 0 of its method, paired by seed. None for fewer than two pairs."""
    of_cell = by_seed(results, method, lag, measure)
    return interval(paired_differences(of_cell, by_seed(results, method, 0, measure)))


def mean(results: Results, method: Method, lag: int, measure: str) -> Interval | None:
    """Return the mean of a cell with its interval. None for fewer than two runs."""
    values = list(by_seed(results, method, lag, measure).values())
    return (geometric if measure in GEOMETRIC else interval)(values) if values else None


def tables(results: Results) -> str:
    """Return all tables, as Markdown."""
    lines = [
        "# Staleness study",
        "",
        f"{len(results)} runs. Means over seeds with 95% intervals (Student's t), n seeds; a dash: fewer than two.",
        f"Mean of logarithms: {', '.join(GEOMETRIC)}.",
    ]
    if diverged := sorted(run.name for run, result in results.items() if result.diverged is not None):
        lines.append(f"Diverged, and in no mean: {', '.join(diverged)}.")
    lines += ["", "## Accuracy minus that of lag 0, paired by seed", "", *_differences(results)]
    lines += ["", *_claims(results)]
    for measure in MEASURES:
        if any(measure in result.measures for result in results.values()):
            lines += ["", f"## {measure[0].upper()}{measure[1:]}", "", *_means(results, measure)]
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """Plot accuracy, mismatch and live agreement by lag, a line for each method, with intervals."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    places = {lag: place for place, lag in enumerate(LAGS)}
    methods = _methods(results)
    for panel, measure in zip(panels, PANELS, strict=True):
        has_cells = False
        for number, method in enumerate(methods):
            cells = [(lag, found) for lag in LAGS if (found := mean(results, method, lag, measure)) is not None]
            # At lag 0 the engines agree exactly, and a logarithmic scale has no zero.
            if measure in GEOMETRIC:
                cells = [(lag, found) for lag, found in cells if lag > 0]
            has_cells |= bool(cells)
            shift = (number - (len(methods) - 1) / 2) * 0.06
            panel.errorbar(
                [places[lag] + shift for lag, _ in cells],
                [found.mean for _, found in cells],
                [[found.mean - found.low for _, found in cells], [found.high - found.mean for _, found in cells]],
                marker="o",
                capsize=3,
                label=str(method),
                linestyle="-" if method.replay == "none" else "--",
            )
        panel.set_xticks(list(places.values()), [str(lag) for lag in LAGS])
        panel.set(xlabel="lag, optimizer steps", title=measure)
        if measure in GEOMETRIC and has_cells:
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=110)


def _methods(results: Results) -> list[Method]:
    found = {run.method for run in results}
    return [
        method for replay in REPLAYS for correction in CORRECTIONS if (method := Method(correction, replay)) in found
    ]


def _differences(results: Results) -> Iterator[str]:
    yield "| | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |"
    yield "|---|" + "---|" * len(LAGS)
    for method in _methods(results):
        cells = ["0" if lag == 0 else shown(difference(results, method, lag), "+.3f") for lag in LAGS]
        yield f"| {method} | " + " | ".join(cells) + " |"


def _claims(results: Results) -> Iterator[str]:
    for method in _methods(results):
        for lag in LAGS:
            found = difference(results, method, lag)
            if found is None or lag == 0 or found.count < FEWEST_FOR_A_CLAIM:
                continue
            verdict = "no difference seen" if found.holds_zero else "lower" if found.mean < 0 else "higher"
            yield f"- {method}, lag {lag}: accuracy {verdict}, {shown(found, '+.3f')}."


def _means(results: Results, measure: str) -> Iterator[str]:
    yield "| | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |"
    yield "|---|" + "---|" * len(LAGS)
    digits = ".2g" if measure.startswith("mismatch") else ".3f"
    for method in _methods(results):
        cells = [shown(mean(results, method, lag, measure), digits) for lag in LAGS]
        yield f"| {method} | " + " | ".join(cells) + " |"

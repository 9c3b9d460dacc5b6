# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables and image of the routing study: means over seeds, and differences from `none`, paired by seed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from examples.routing_study.grid import BASELINE, METHODS, Condition
from examples.routing_study.measures import MEASURES, Results
from examples.studies.intervals import Interval, geometric, interval, paired_differences, paired_factors

FACTORS = ("mismatch, median step", "mismatch, worst step", "largest ratio")
"""Measures that span powers of ten, with geometric means, and with factors as comparisons."""
MAIN_MEASURE = "accuracy"
PANELS = (MAIN_MEASURE, "mismatch, median step", "mismatch, worst step")
"""Measures in the image."""

BySeed = dict[int, float]


def by_seed(results: Results, condition: Condition, method: str, measure: str) -> BySeed:
    """Return a measure of each run of a cell, except runs that diverged or lack it."""
    return {
        run.seed: result.measures[measure]
        for run, result in results.items()
        if (run.condition, run.method) == (condition, method) and measure in result.measures
    }


def conditions_of(results: Results) -> list[Condition]:
    """Return the conditions with runs, in order."""
    return sorted({run.condition for run in results})


def methods_of(results: Results, condition: Condition) -> list[str]:
    """Return the methods with runs in a condition, in the order of the study."""
    found = {run.method for run in results if run.condition == condition}
    return [method for method in METHODS if method in found]


def title_of(condition: Condition) -> str:
    """Return the title of a condition's tables."""
    updates = "1 update" if condition.updates == 1 else f"{condition.updates} updates"
    return f"{condition.model} model, rollouts in {condition.dtype}, {updates} a step"


def number(value: float) -> str:
    """Format a number with four decimals, or with two digits if it is small."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2g}"


def shown(found: Interval | None) -> str:
    """Format a mean with its interval. None is a dash."""
    return "-" if found is None else f"{number(found.mean)} ({number(found.low)} to {number(found.high)})"


def tables(results: Results) -> str:
    """Return all tables, as Markdown."""
    lines = ["# Routing study", "", *_legend(results), ""]
    for condition in conditions_of(results):
        lines += [f"## {title_of(condition)}", "", *_means(results, condition), ""]
        lines += [*_differences(results, condition), ""]
    return "\n".join(lines)


def _legend(results: Results) -> Iterator[str]:
    yield f"{len(results)} runs. Means over seeds with 95% intervals (Student's t); a dash: fewer than two seeds."
    yield f"Geometric means and factors: {'; '.join(FACTORS)}."
    yield "Differences are paired by seed, and not corrected for their number: of 20 about one misses 0 by chance."
    diverged = sorted(run.name for run, result in results.items() if result.diverged is not None)
    if diverged:
        yield f"Diverged, and in no mean: {', '.join(diverged)}."
    yield start_check(results)


def start_check(results: Results) -> str:
    """Return a line on the accuracies before the first step. A pair's are equal if validation does not replay."""
    pairs = unequal = 0
    for condition in conditions_of(results):
        baseline = by_seed(results, condition, BASELINE, "accuracy at start")
        for method in methods_of(results, condition):
            if method != BASELINE:
                differences = paired_differences(by_seed(results, condition, method, "accuracy at start"), baseline)
                pairs += len(differences)
                unequal += sum(difference != 0 for difference in differences)
    return (
        f"Before the first step method and `{BASELINE}` have the same held-out accuracy in {pairs - unequal} of {pairs}"
        " pairs: validation takes the policy's own routes."
    )


def _means(results: Results, condition: Condition) -> Iterator[str]:
    methods = methods_of(results, condition)
    counts = [sum((run.condition, run.method) == (condition, method) for run in results) for method in methods]
    yield "| | " + " | ".join(f"{name}, {n} seeds" for name, n in zip(methods, counts, strict=True)) + " |"
    yield "|---|" + "---|" * len(methods)
    for measure in MEASURES:
        cells = [list(by_seed(results, condition, method, measure).values()) for method in methods]
        if any(cells):
            mean = geometric if measure in FACTORS else interval
            yield f"| {measure} | " + " | ".join(shown(mean(values)) for values in cells) + " |"


def _differences(results: Results, condition: Condition) -> Iterator[str]:
    methods = [method for method in methods_of(results, condition) if method != BASELINE]
    if not methods:
        return
    yield f"| paired with `{BASELINE}` | " + " | ".join(methods) + " |"
    yield "|---|" + "---|" * len(methods)
    for measure in MEASURES:
        found = [compared(results, condition, method, measure) for method in methods]
        if any(found) and measure != "accuracy at start":
            kind = "factor" if measure in FACTORS else "difference"
            yield f"| {measure}: {kind} | " + " | ".join(map(shown, found)) + " |"
    accuracies = [by_seed(results, condition, method, MAIN_MEASURE) for method in (BASELINE, *methods)]
    lower = [_how_often_lower(of_method, accuracies[0]) for of_method in accuracies[1:]]
    yield f"| seeds with a lower {MAIN_MEASURE} | " + " | ".join(lower) + " |"


def _how_often_lower(method: Mapping[int, float], baseline: Mapping[int, float]) -> str:
    differences = paired_differences(method, baseline)
    return f"{sum(difference < 0 for difference in differences)} of {len(differences)}"


def draw(results: Results, path: Path) -> bool:
    """Plot paired differences of accuracy and factors of mismatch with intervals. Returns False without any pairs."""
    rows = [
        (condition, method)
        for condition in conditions_of(results)
        for method in methods_of(results, condition)
        if method != BASELINE and compared(results, condition, method, MAIN_MEASURE) is not None
    ]
    if not rows:
        return False
    figure = Figure(figsize=(13, 1.5 + 0.32 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axis, measure in zip(panels, PANELS, strict=True):
        _draw_intervals(axis, [compared(results, condition, method, measure) for condition, method in rows])
        is_factor = measure in FACTORS
        axis.axvline(1 if is_factor else 0, color="gray", linewidth=1)
        axis.set(
            title=f"{measure}, {'over' if is_factor else 'minus'} {BASELINE}", xscale="log" if is_factor else "linear"
        )
        if is_factor:
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    panels[0].set_yticks(range(len(rows)), [_label(results, condition, method) for condition, method in rows])
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=110)
    return True


def compared(results: Results, condition: Condition, method: str, measure: str) -> Interval | None:
    """Return the difference of a method from the baseline, or its factor, paired by seed."""
    pair = [by_seed(results, condition, each, measure) for each in (method, BASELINE)]
    return geometric(paired_factors(*pair)) if measure in FACTORS else interval(paired_differences(*pair))


def _label(results: Results, condition: Condition, method: str) -> str:
    found = compared(results, condition, method, MAIN_MEASURE)
    return f"{method}: {title_of(condition)}, {found.count if found else 0} seeds"


def _draw_intervals(axis: Axes, rows: Sequence[Interval | None]) -> None:
    for place, found in enumerate(rows):
        if found is not None:
            axis.plot([found.low, found.high], [place, place], color="tab:blue")
            axis.plot([found.mean], [place], "o", color="tab:blue")

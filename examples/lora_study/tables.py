# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables and image of the study of adapters: means over seeds, and differences from training all weights."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from examples.lora_study.grid import BASELINE, METHODS, RATE_SEEDS
from examples.lora_study.measures import MEASURES, Results
from examples.studies.intervals import (
    FEWEST_FOR_A_CLAIM,
    Interval,
    geometric,
    interval,
    paired_differences,
    paired_factors,
    shown,
)

FACTORS = ("mismatch", "divergence from the base, last step")
"""Measures that span powers of ten, with geometric means, and with factors as comparisons."""
PANELS = ("accuracy", "routing drift from the base, last step", "divergence from the base, last step")


def by_seed(results: Results, method: str, rate: float, measure: str, *, of_rates: bool = False) -> dict[int, float]:
    """Return a measure of each run of a cell, except runs that diverged or lack it.

    Args:
        of_rates: Take the runs for the choice of rates instead of the comparison's.
    """
    return {
        run.seed: result.measures[measure]
        for run, result in results.items()
        if (run.method, run.rate, run.seed in RATE_SEEDS) == (method, rate, of_rates) and measure in result.measures
    }


def mean(results: Results, method: str, measure: str) -> Interval | None:
    """Return the mean of a method at its rate. None for fewer than two runs."""
    values = list(by_seed(results, method, METHODS[method].rate, measure).values())
    return (geometric if measure in FACTORS else interval)(values) if values else None


def compared(results: Results, method: str, measure: str) -> Interval | None:
    """Return the difference of a method from the baseline, or its factor, paired by seed."""
    of_method, of_baseline = (by_seed(results, each, METHODS[each].rate, measure) for each in (method, BASELINE))
    if measure in FACTORS:
        return geometric(paired_factors(of_method, of_baseline))
    return interval(paired_differences(of_method, of_baseline))


def tables(results: Results) -> str:
    """Return all tables, as Markdown."""
    lines = [
        "# Study of adapters",
        "",
        f"{len(results)} runs. Means over seeds with 95% intervals (Student's t), n seeds; a dash: fewer than two.",
        f"Geometric means and factors: {'; '.join(FACTORS)}.",
    ]
    if diverged := sorted(run.name for run, result in results.items() if result.diverged is not None):
        lines.append(f"Diverged, and in no mean: {', '.join(diverged)}.")
    lines += ["", "## Choice of the learning rates: accuracy with other seeds", "", *_rates(results)]
    lines += ["", "## At the chosen rates", "", *_means(results), "", *_differences(results), "", *_claims(results)]
    return "\n".join(lines)


def _rates(results: Results) -> Iterator[str]:
    yield "| method | rate | accuracy | chosen |"
    yield "|---|---|---|---|"
    for name, method in METHODS.items():
        for rate in method.rates:
            found = interval(list(by_seed(results, name, rate, "accuracy", of_rates=True).values()))
            yield f"| {name} | {rate:.0e} | {shown(found, '.3f')} | {'yes' if rate == method.rate else ''} |"


def _means(results: Results) -> Iterator[str]:
    yield "| | " + " | ".join(METHODS) + " |"
    yield "|---|" + "---|" * len(METHODS)
    for measure in MEASURES:
        cells = [shown(mean(results, method, measure), _digits(measure)) for method in METHODS]
        yield f"| {measure} | " + " | ".join(cells) + " |"


def _differences(results: Results) -> Iterator[str]:
    others = [method for method in METHODS if method != BASELINE]
    yield f"| paired with `{BASELINE}` | " + " | ".join(others) + " |"
    yield "|---|" + "---|" * len(others)
    for measure in MEASURES:
        is_factor = measure in FACTORS
        digits = ".2f" if is_factor else "+.4f"
        cells = [shown(compared(results, method, measure), digits) for method in others]
        yield f"| {measure}: {'factor' if is_factor else 'difference'} | " + " | ".join(cells) + " |"


def _claims(results: Results) -> Iterator[str]:
    for method in METHODS:
        found = compared(results, method, "accuracy")
        if method == BASELINE or found is None or found.count < FEWEST_FOR_A_CLAIM:
            continue
        verdict = "no difference seen" if found.holds_zero else "lower" if found.mean < 0 else "higher"
        yield f"- {method}: accuracy {verdict}, {shown(found, '+.3f')}."


def _digits(measure: str) -> str:
    return ".2g" if measure in FACTORS else ".4f"


def draw(results: Results, path: Path) -> None:
    """Plot the main measures of each method at its rate, with intervals, and each run as a point."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for panel, measure in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        found_any = False
        for place, method in enumerate(METHODS):
            values = list(by_seed(results, method, METHODS[method].rate, measure).values())
            panel.plot([place] * len(values), values, ".", color="lightgray")
            if (found := mean(results, method, measure)) is not None:
                panel.plot([place, place], [found.low, found.high], color="tab:blue")
                panel.plot([place], [found.mean], "o", color="tab:blue")
                found_any = True
        panel.set_xticks(range(len(METHODS)), list(METHODS))
        panel.set(title=measure, yscale="log" if measure in FACTORS and found_any else "linear")
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)

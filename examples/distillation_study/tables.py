# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables and image of the study of distillation: means over seeds, and differences from GRPO."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from examples.distillation_study.grid import BASELINE, LEARNING_RATES, METHODS, TUNED, TUNING_SEEDS
from examples.distillation_study.measures import COMPARED, MEAN_ACCURACY, MEASURES, VALIDATED_AFTER, Results
from examples.studies.intervals import Interval, interval, paired_differences, shown


def by_seed(results: Results, method: str, measure: str, rate: str | None = None) -> dict[int, float]:
    """Return a measure of each run of a method, except runs that diverged or lack it.

    Args:
        rate: Tried learning rate. None for the rate of the comparison.
    """
    return {
        run.seed: result.measures[measure]
        for run, result in results.items()
        if run.method == method and run.learning_rate == rate and measure in result.measures
    }


def mean(results: Results, method: str, measure: str) -> Interval | None:
    """Return the mean of a method over its seeds. None for fewer than two runs."""
    return interval(list(by_seed(results, method, measure).values()))


def tables(results: Results) -> str:
    """Return all tables, as Markdown."""
    lines = [
        "# Study of distillation",
        "",
        f"{len(results)} runs. Means over seeds with 95% intervals (Student's t), n seeds; a dash: fewer than two.",
    ]
    if diverged := sorted(run.name for run, result in results.items() if result.diverged is not None):
        lines.append(f"Diverged, and in no mean: {', '.join(diverged)}.")
    return "\n".join([*lines, "", *_tuning(results), "", *_means(results), "", *_differences(results)])


def _tuning(results: Results) -> Iterator[str]:
    yield f"| {MEAN_ACCURACY}, seeds {TUNING_SEEDS}, by learning rate | " + " | ".join(LEARNING_RATES) + " |"
    yield "|---|" + "---|" * len(LEARNING_RATES)
    for method in TUNED:
        of_rates = [by_seed(results, method, MEAN_ACCURACY, rate).values() for rate in LEARNING_RATES]
        cells = [" ".join(f"{value:.3f}" for value in found) or "-" for found in of_rates]
        yield f"| `{method}` | " + " | ".join(cells) + " |"


def _means(results: Results) -> Iterator[str]:
    yield "| | " + " | ".join(METHODS) + " |"
    yield "|---|" + "---|" * len(METHODS)
    for measure in MEASURES:
        cells = [shown(mean(results, method, measure), ".3f") for method in METHODS]
        yield f"| {measure} | " + " | ".join(cells) + " |"


def _differences(results: Results) -> Iterator[str]:
    others = [method for method in METHODS if method != BASELINE]
    yield f"| less that of `{BASELINE}` of the same seed | " + " | ".join(others) + " |"
    yield "|---|" + "---|" * len(others)
    for measure in COMPARED:
        baseline = by_seed(results, BASELINE, measure)
        differences = [paired_differences(by_seed(results, method, measure), baseline) for method in others]
        cells = [shown(interval(found), "+.3f") for found in differences]
        yield f"| {measure} | " + " | ".join(cells) + " |"


def draw(results: Results, path: Path) -> None:
    """Plot the accuracy of each method over the steps: its mean, and each run as a thin line."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for number, method in enumerate(METHODS):
        of_steps = [by_seed(results, method, f"accuracy after {step} steps") for step in VALIDATED_AFTER]
        color = f"C{number}"
        for seed in of_steps[0]:
            values = [found.get(seed, float("nan")) for found in of_steps]
            panel.plot(VALIDATED_AFTER, values, color=color, linewidth=0.6, alpha=0.5)
        if of_steps[0]:
            means = [sum(found.values()) / len(found) for found in of_steps]
            panel.plot(VALIDATED_AFTER, means, "o-", color=color, label=method)
    panel.set(xlabel="steps", ylabel="accuracy on held-out sums")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, dpi=110)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of the demo with a tool: progress of the runs, and experts by the tokens' writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from examples.tools_demo.results import METHODS, Run, Validation
from nemo_rl_moe.routing.metrics.writers import WriterLoad
from nemo_rl_moe.runs.folder.writer_load import read_writer_load
from nemo_rl_moe.runs.loggers.writer_plots import draw_writers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST_STEPS = 10
_PANELS = {
    "hard questions: share that is right": "hard right",
    "hard questions: share with a call": "hard called",
    "easy questions: share that is right": "easy right",
    "easy questions: share with a call": "easy called",
}
_COLOURS = {"tool": "#2166ac", "no_tool": "#b2182b", "coin": "0.5"}


def draw_learning(results: Mapping[Run, Mapping[int, Validation]]) -> "Figure":
    """Plot the validations of each run, with a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (title, measure) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        for method, words in METHODS.items():
            runs = [found for run, found in results.items() if run.method == method]
            for number, found in enumerate(runs):
                steps = [step for step, shares in found.items() if measure in shares]
                values = [found[step][measure] for step in steps]
                label = words if number == 0 else None
                axes.plot(steps, values, color=_COLOURS[method], marker="o", markersize=4, linewidth=1, label=label)
        axes.set(title=title, xlabel="step", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    return figure


def draw_routing(run_folder: Path) -> "Figure":
    """Plot the experts by the tokens' writer, over the last steps of a run.

    Raises:
        FileNotFoundError: The run has no such counts.
    """
    history = read_writer_load(run_folder)
    counts = history.counts[-LAST_STEPS:].sum(0)
    first, last = history.steps[-LAST_STEPS:][0], history.steps[-1]
    title = f"Experts by who wrote the token, steps {first} to {last}"
    return draw_writers(title, WriterLoad(tuple(history.layers.tolist()), counts))

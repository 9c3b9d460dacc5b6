# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plot of a step's experts by who wrote the tokens: a heatmap for each writer, and the divergence between writers."""

from typing import TYPE_CHECKING

import numpy as np

from nemo_rl_moe.routing.metrics.load_arrays import utilization
from nemo_rl_moe.routing.metrics.writers import WriterLoad, divergences
from nemo_rl_moe.runs.loggers.expert_load_plots import cell_colors
from nemo_rl_moe.runs.loggers.plots import (
    BOTTOM,
    LEFT,
    TOP,
    add_title,
    as_png,
    axes_at,
    layer_ticks,
    new_figure,
    write_in_cells,
)
from nemo_rl_moe.shapes import Int
from nemo_rl_moe.token_writers import WRITERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WRITER_KEY = "plots/experts_by_writer"
_WIDTH, _GAP, _LEAST_HEIGHT, _MOST_HEIGHT, _HEIGHT_OF_LAYER = 360, 50, 140, 480, 44
_LABELS = ("in the prompt", "in earlier responses, or calls", "between responses, or results", "in the last response")
"""Label of each writer. Environments without tools have responses and messages instead of calls and results."""
_MOST_CELLS_WITH_TEXT, _MOST_LABELS = 80, 12
_DARK = 0.5


def writer_plots(step: int, load: WriterLoad) -> dict[str, bytes]:
    """Return key -> PNG file of a plot of expert loads by who wrote the tokens. Empty without tokens."""
    if not load.counts.any():
        return {}
    return {WRITER_KEY: as_png(draw_writers(f"Experts by who wrote the token at step {step}", load))}


def draw_writers(title: str, load: WriterLoad) -> "Figure":
    """Return a plot of each expert's load over its fair share, separately by who wrote the tokens.

    The four panels are for the tokens of the prompt, of calls, of results and of the last response (`WRITERS`).
    """
    num_layers, loads = len(load.layers), load.counts.sum(-1)
    height = min(max(_HEIGHT_OF_LAYER * num_layers, _LEAST_HEIGHT), _MOST_HEIGHT)
    figure = new_figure((LEFT + 2 * _WIDTH + _GAP + 40, TOP + 2 * (height + BOTTOM) + 36))
    for writer in range(len(WRITERS)):
        row, column = divmod(writer, 2)
        axes = axes_at(figure, LEFT + column * (_WIDTH + _GAP), TOP + 24 + row * (height + BOTTOM), _WIDTH, height)
        share = loads[writer].sum() / loads.sum()
        axes.set_title(f"{_LABELS[writer]} ({share:.0%} of tokens)", fontsize=11, loc="left")
        _draw_load(axes, load, writer)
        if column == 0:
            axes.set_ylabel("layer")
        if row == 1:
            axes.set_xlabel("expert")
    add_title(figure, title, _summary(load))
    return figure


def _draw_load(axes: "Axes", load: WriterLoad, writer: int) -> None:
    counts: Int[np.ndarray, "layers experts"] = load.counts[writer]
    colors = cell_colors(counts)
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    axes.set_yticks(*layer_ticks(load.layers, _MOST_LABELS))
    axes.locator_params(axis="x", integer=True)
    if counts.size <= _MOST_CELLS_WITH_TEXT and counts.any():
        values = {cell: f"{value:.1f}" for cell, value in np.ndenumerate(utilization(counts))}
        write_in_cells(axes, values, colors.mean(-1) < _DARK, fontsize=8)


def _summary(load: WriterLoad) -> str:
    """Return one line about the colour scale, and the divergences of the loads by writer in bits."""
    parts = ["load over fair share: blue below, red above"]
    for name, words in (("results_from_own", "results from own tokens"), ("calls_from_answers", "calls from answers")):
        of_layers = divergences(load.counts)[name]
        if not np.isnan(of_layers).any():
            parts.append(f"{words}: {of_layers.mean():.2f} bits")
    return ";  ".join(parts)

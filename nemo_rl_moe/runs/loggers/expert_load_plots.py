# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of the expert load for backends that show images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from nemo_rl_moe.routing.metrics.load_arrays import coefficient_of_variation, dead, utilization
from nemo_rl_moe.runs.loggers.plots import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    add_title,
    as_png,
    axes_at,
    new_figure,
    write_in_cells,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

MOST_DOUBLINGS = 2
"""The colour scale covers 1/2^2 to 2^2 times the fair share."""
ANCHORS = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (244, 165, 130), (178, 24, 43))
"""Colours of the scale (RGB, 0 to 255), from the lowest to the highest load, also for colour-blind readers."""

HEATMAP_KEY = "plots/expert_load"
SORTED_LOAD_KEY = "plots/expert_load_sorted"

DEAD_COLOR = (0.0, 0.0, 0.0)
NO_LOAD_COLOR = (0.75, 0.75, 0.75)

_HEATMAP_PIXELS = 1280, 600
_LEAST_LABEL_PIXELS = 16
_LEAST_CELL_WITH_TEXT = 44, 26
_MOST_LINES = 8
_LINEAR_UP_TO = 2.0


@dataclass(frozen=True)
class HeatmapGeometry:
    num_layers: int
    num_experts: int

    @property
    def cell(self) -> tuple[int, int]:
        width, height = _HEATMAP_PIXELS
        return min(72, max(3, width // self.num_experts)), min(40, max(8, height // self.num_layers))

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.cell
        # At least wide enough for the title, and high enough for the scale.
        return LEFT + max(640, width * self.num_experts) + RIGHT, TOP + max(200, height * self.num_layers) + BOTTOM

    def center(self, row: int, expert: int) -> tuple[int, int]:
        width, height = self.cell
        return LEFT + width * expert + width // 2, TOP + height * row + height // 2


def expert_load_plots(step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]) -> dict[str, bytes]:
    """Return key -> PNG file of the heatmap, and of the plot of sorted loads."""
    return {
        HEATMAP_KEY: as_png(draw_heatmap(step, layers, counts)),
        SORTED_LOAD_KEY: as_png(draw_sorted_load(step, layers, counts)),
    }


def cell_colors(counts: Int[np.ndarray, "layers experts"]) -> Float[np.ndarray, "layers experts rgb"]:
    """Return each cell's RGB on a logarithmic scale: blue below the fair share, red above it, black if dead."""
    log_utilization = np.log2(np.clip(utilization(counts), 2.0**-MOST_DOUBLINGS, 2.0**MOST_DOUBLINGS))
    position_on_scale = (log_utilization + MOST_DOUBLINGS) / (2 * MOST_DOUBLINGS)
    colors: Float[np.ndarray, "layers experts rgb"] = _colormap()(position_on_scale)[..., :3]
    colors[counts.sum(-1) == 0] = NO_LOAD_COLOR
    colors[dead(counts)] = DEAD_COLOR
    return colors


def draw_heatmap(step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]) -> "Figure":
    """Return a plot of layers by experts, whose colours show the load over the fair share."""
    geometry = HeatmapGeometry(*counts.shape)
    figure = new_figure(geometry.size)
    cell_width, cell_height = geometry.cell
    axes = axes_at(figure, LEFT, TOP, cell_width * counts.shape[1], cell_height * counts.shape[0])
    colors = cell_colors(counts)
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    axes.spines[:].set_position(("outward", 1))  # keeps the frame off the outer cells
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_xticks(_ticks(counts.shape[1], cell_width, 3 * _LEAST_LABEL_PIXELS))
    rows = _ticks(counts.shape[0], cell_height, _LEAST_LABEL_PIXELS)
    axes.set_yticks(rows, labels=[str(layers[row]) for row in rows])
    if cell_width >= _LEAST_CELL_WITH_TEXT[0] and cell_height >= _LEAST_CELL_WITH_TEXT[1]:
        values = {cell: f"{value:.2f}" for cell, value in np.ndenumerate(utilization(counts))}
        luminance = colors @ np.array([0.299, 0.587, 0.114])
        write_in_cells(axes, values, luminance < 0.5)
    add_title(figure, f"Expert load at step {step}", _summary(layers, counts))
    _draw_scale(figure, geometry, counts)
    return figure


def draw_sorted_load(step: int, layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]) -> "Figure":
    """Return a plot of each layer's loads in descending order. Many layers are shown as quantiles over the layers."""
    num_experts = counts.shape[1]
    figure = new_figure((1000, 560))
    axes = axes_at(figure, 80, TOP, 880, 560 - TOP - BOTTOM)
    used = np.flatnonzero(counts.sum(-1))
    descending = -np.sort(-utilization(counts[used]), axis=-1)
    ranks = np.arange(1, num_experts + 1)
    if len(used) > _MOST_LINES:
        _draw_bands(axes, ranks, descending)
        worst = int(coefficient_of_variation(counts[used]).argmax())
        label = f"layer {layers[int(used[worst])]}, most uneven"
        axes.plot(ranks, descending[worst], color="#b2182b", linewidth=1.5, label=label)
    else:
        for row, loads in zip(used.tolist(), descending, strict=True):
            marker = "." if num_experts <= 32 else None
            axes.plot(ranks, loads, linewidth=1.5, marker=marker, label=f"layer {layers[row]}")
    axes.plot(ranks, _by_chance(counts[used]), color="black", linewidth=1, linestyle=":", label="routing at random")
    axes.axhline(1.0, color="black", linewidth=1, label="fair share")
    axes.set(xlabel="experts of a layer, sorted by load", ylabel="load over fair share")
    axes.set_xlim(0.5, num_experts + 0.5)
    # An expert with thirty times its share must not squeeze all others together.
    axes.set_yscale("symlog", base=2, linthresh=_LINEAR_UP_TO, linscale=4)
    highest = max(_LINEAR_UP_TO, 1.1 * float(descending.max(initial=0.0)))
    marks = [0.0, 0.5, 1.0, 1.5, *(2.0**power for power in range(1, 13))]
    axes.set_yticks(marks, labels=[f"{mark:g}" for mark in marks])
    axes.set_ylim(0.0, highest)
    axes.minorticks_off()
    axes.locator_params(axis="x", nbins=12, integer=True)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", frameon=False)
    add_title(figure, f"Experts sorted by load at step {step}", _summary(layers, counts))
    return figure


@cache
def _colormap() -> "LinearSegmentedColormap":
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("utilization", [tuple(c / 255 for c in rgb) for rgb in ANCHORS], N=255)


def _summary(layers: Sequence[int], counts: Int[np.ndarray, "layers experts"]) -> str:
    """Return one line about the busiest expert and the number of dead experts."""
    loads = utilization(counts)
    row, expert = divmod(int(loads.argmax()), loads.shape[1])
    is_dead = dead(counts)
    rows = np.flatnonzero(is_dead.any(-1))
    where = f" in layer {layers[rows[0]]}" if len(rows) == 1 else f" in {len(rows)} layers"
    died = f"{is_dead.sum():,} of {counts.size:,} experts{where}" if len(rows) else f"none of {counts.size:,} experts"
    return f"busiest: layer {layers[row]}, expert {expert}, {loads.max():.2f} times its fair share;  dead: {died}"


def _draw_scale(figure: "Figure", geometry: HeatmapGeometry, counts: Int[np.ndarray, "layers experts"]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    left = LEFT + geometry.cell[0] * geometry.num_experts + 36
    bar = figure.colorbar(
        ScalarMappable(Normalize(-MOST_DOUBLINGS, MOST_DOUBLINGS), _colormap()),
        cax=axes_at(figure, left, TOP, 16, 150),
        ticks=[-2, -1, 0, 1, 2],
    )
    bar.ax.set_yticklabels(["≤ ¼", "½", "1 (fair)", "2", "≥ 4"])
    marks = [(DEAD_COLOR, "dead"), (NO_LOAD_COLOR, "no tokens")]
    for index, (color, label) in enumerate(marks if (counts.sum(-1) == 0).any() else marks[:1]):
        patch = axes_at(figure, left, TOP + 166 + 24 * index, 16, 16)
        patch.set(xticks=[], yticks=[], facecolor=color)
        patch.text(1.5, 0.5, label, transform=patch.transAxes, va="center", fontsize=10)


def _ticks(number: int, pixels: int, least: int) -> range:
    """Return every n-th of `number` positions, so that they are at least `least` pixels apart. n is a power of two."""
    distance = 1
    while distance * pixels < least:
        distance *= 2
    return range(0, number, distance)


def _draw_bands(axes: "Axes", ranks: Int[np.ndarray, " experts"], loads: Float[np.ndarray, "layers experts"]) -> None:
    """Add quantiles over the layers, at each rank in the order of loads."""
    for share, color, label in ((0.0, "#d1e5f0", "all layers"), (0.25, "#92c5de", "the middle half of the layers")):
        low, high = np.quantile(loads, [share, 1 - share], axis=0)
        axes.fill_between(ranks, low, high, color=color, linewidth=0, label=label)
    axes.plot(ranks, np.median(loads, axis=0), color="#2166ac", linewidth=1.5, label="median of the layers")


def _by_chance(counts: Int[np.ndarray, "layers experts"]) -> Float[np.ndarray, " experts"]:
    """Return the sorted utilization of random routing at the layers' median load (normal approximation to Poisson)."""
    num_experts = counts.shape[1]
    deviation = math.sqrt(num_experts / float(np.median(counts.sum(-1)))) if len(counts) else 0.0
    normal = NormalDist()
    return np.array([max(0.0, 1 - deviation * normal.inv_cdf((n + 0.5) / num_experts)) for n in range(num_experts)])

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of a step for backends that show images: agreement of routes, experts by advantage, experts by modality.

matplotlib is imported by the first plot, since the import takes seconds.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from nemo_rl_moe.routing.agreement.row_kinds import Row
from nemo_rl_moe.routing.metrics.modalities import modality_separation, specialization

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure


DPI = 100
LEFT, RIGHT, TOP, BOTTOM = 80, 130, 84, 64
"""Pixels around the axes. The title is above them."""


def as_png(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    content = BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def new_figure(size: tuple[int, int]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI, facecolor="white")
    figure.set_layout_engine("none")  # a layout engine from the user's matplotlib settings would move the cells
    return figure


def axes_at(figure: "Figure", left: int, top: int, width: int, height: int) -> "Axes":
    full_width, full_height = (round(inches * DPI) for inches in figure.get_size_inches())
    return figure.add_axes(
        (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
    )


def add_title(figure: "Figure", title: str, summary: str) -> None:
    height = figure.get_size_inches()[1] * DPI
    left = LEFT / (figure.get_size_inches()[0] * DPI)
    figure.text(left, 1 - 30 / height, title, fontsize=14, fontweight="bold")
    figure.text(left, 1 - 56 / height, summary, fontsize=10)


def layer_ticks(layers: Sequence[int], most: int = 24) -> tuple[range, list[str]]:
    """Return positions and labels of at most `most` evenly spaced layers."""
    every = max(1, -(-len(layers) // most))
    return range(0, len(layers), every), [str(layer) for layer in layers[::every]]


def write_in_cells(
    axes: "Axes", texts: Mapping[tuple[int, ...], str], is_dark: Bool[np.ndarray, "rows columns"], fontsize: int = 9
) -> None:
    """Write texts into cells `(row, column)`, white on dark cells and black on others."""
    for (row, column), text in texts.items():
        color = "white" if is_dark[row, column] else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=fontsize, color=color)


AGREEMENT_KEY = "plots/routing_agreement"
_LEAST_AGREEMENT_SPAN = 0.01
"""Smallest height of the axis, so that disagreement in one row of a thousand does not look large."""


def routing_plots(step: int, layers: Sequence[int], rows: Int[np.ndarray, "layers kinds"]) -> dict[str, bytes]:
    """Return key -> PNG file of a plot of the routers' agreement with the rollout. Empty without usable routes."""
    if not rows[:, Row.USABLE].any():
        return {}
    return {AGREEMENT_KEY: as_png(draw_agreement(step, layers, rows))}


def draw_agreement(step: int, layers: Sequence[int], rows: Int[np.ndarray, "layers kinds"]) -> "Figure":
    """Return a plot of each layer's agreement with the rollout: of the experts used in training, and of the
    experts that the routers would choose without replay.
    """
    figure = new_figure((1000, 560))
    axes = axes_at(figure, 80, TOP, 880, 560 - TOP - BOTTOM)
    known = np.flatnonzero(rows[:, Row.USABLE])
    usable = rows[known, Row.USABLE]
    live, taken = rows[known, Row.LIVE_SAME] / usable, rows[known, Row.TAKEN_SAME] / usable
    axes.plot(known, taken, color="#2166ac", linewidth=1, marker="s", markersize=5, label="as training took them")
    axes.plot(known, live, color="#b2182b", linewidth=1, marker="o", markersize=5, label="as routers would choose")
    lowest = min(live.min(), taken.min())
    axes.set_ylim(
        max(0.0, 1 - max(1.15 * (1 - lowest), _LEAST_AGREEMENT_SPAN)), 1 + 0.05 * max(1 - lowest, _LEAST_AGREEMENT_SPAN)
    )
    axes.set_xlim(-0.5, len(layers) - 0.5)
    axes.set_xticks(*layer_ticks(layers))
    axes.set(xlabel="layer", ylabel="share of rows with the experts of the rollout")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.legend(loc="best", frameon=False)
    worst = int(known[live.argmin()])
    expected, found = int(rows[:, Row.EXPECTED].sum()), int(usable.sum())
    summary = f"lowest: layer {layers[worst]}, {live.min():.4f} by itself;  {found:,} of {expected:,} rows usable"
    add_title(figure, f"Agreement with the routes of the rollouts at step {step}", summary)
    return figure


ADVANTAGE_KEY = "plots/experts_by_advantage"
_WIDTH, _MOST_HEIGHT, _LEAST_HEIGHT, _HEIGHT_OF_LAYER = 800, 900, 160, 40
_LEAST_SPAN = 4.0
"""Smallest upper end of the scale. Among many experts, some reach a score of 4 by chance."""


def advantage_plots(step: int, layers: Sequence[int], scores: Float[np.ndarray, "layers experts"]) -> dict[str, bytes]:
    """Return key -> PNG file of a plot of each expert's score by advantage. Empty without scores."""
    if np.isnan(scores).all():
        return {}
    return {ADVANTAGE_KEY: as_png(draw_advantages(step, layers, scores))}


def draw_advantages(step: int, layers: Sequence[int], scores: Float[np.ndarray, "layers experts"]) -> "Figure":
    """Return a plot of each expert's score: red if its use is higher at high advantages, blue at low advantages."""
    figure, axes, bar = _layers_by_experts(layers, scores, max(float(np.nanmax(np.abs(scores))), _LEAST_SPAN))
    axes.set(xlabel="expert", ylabel="layer")
    bar.set_label("standard deviations from chance")
    layer, expert = divmod(int(np.nanargmax(np.abs(scores))), scores.shape[1])
    excess = float(np.nanmean(np.square(scores))) - 1
    summary = (
        f"furthest: layer {layers[layer]}, expert {expert}, {scores[layer, expert]:+.1f};"
        f"  mean square {excess:+.2f} beyond chance"
    )
    add_title(figure, f"Experts by advantage at step {step}", summary)
    return figure


def _layers_by_experts(
    layers: Sequence[int], values: Float[np.ndarray, "layers experts"], span: float
) -> "tuple[Figure, Axes, Colorbar]":
    """Return a plot of values from blue (`-span`) to red (`span`), with NaN in grey: figure, axes, colour bar."""
    height = min(max(_HEIGHT_OF_LAYER * len(layers), _LEAST_HEIGHT), _MOST_HEIGHT)
    figure = new_figure((LEFT + _WIDTH + RIGHT, TOP + height + BOTTOM))
    axes = axes_at(figure, LEFT, TOP, _WIDTH, height)
    axes.set_facecolor("0.6")
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-span, vmax=span)
    axes.set_yticks(*layer_ticks(layers))
    return figure, axes, figure.colorbar(image, cax=axes_at(figure, LEFT + _WIDTH + 16, TOP, 16, height))


MODALITY_KEY = "plots/experts_by_modality"
_MOST_CELLS_WITH_TEXT = 200
_MOST_EXPERTS_WITH_TEXT = 20
_STRONG = 0.6
"""Smallest preference (0 to 1) for one kind of tokens at which an expert's cell is dark, so that its text is white."""


def modality_plots(
    step: int,
    layers: Sequence[int],
    counts: Int[np.ndarray, "layers experts"],
    image_counts: Int[np.ndarray, "layers experts"],
    topk: int | None,
) -> dict[str, bytes]:
    """Return key -> PNG file of a plot of image and text tokens by expert. Empty if all tokens are of one kind."""
    if image_counts.sum() in (0, counts.sum()):
        return {}
    return {MODALITY_KEY: as_png(draw_modalities(step, layers, counts, image_counts, topk))}


def draw_modalities(
    step: int,
    layers: Sequence[int],
    counts: Int[np.ndarray, "layers experts"],
    image_counts: Int[np.ndarray, "layers experts"],
    topk: int | None,
) -> "Figure":
    """Return a plot of each expert's preference for image (red) or text tokens (blue), with its share of images."""
    leaning = specialization(counts, image_counts, topk)
    figure, axes, bar = _layers_by_experts(layers, leaning, 1)
    axes.set(xlabel="expert", ylabel="layer")
    axes.locator_params(axis="x", integer=True)
    if counts.shape[1] <= _MOST_EXPERTS_WITH_TEXT and counts.size <= _MOST_CELLS_WITH_TEXT:
        axes.set_xlabel("expert (cell: share of its tokens that are image tokens)")
        shares = {cell: f"{image_counts[cell] / count:.0%}" for cell, count in np.ndenumerate(counts) if count}
        write_in_cells(axes, shares, np.abs(leaning) > _STRONG)
    bar.set_ticks([-1, 0, 1])
    bar.ax.set_yticklabels(["text only", "as overall", "image only"])
    separation = modality_separation(counts, image_counts, topk)
    furthest = int(np.nanargmax(separation))
    summary = (
        f"image tokens: {image_counts.sum() / counts.sum():.1%} overall;  separation: {np.nanmean(separation):.2f} on "
        f"average, {separation[furthest]:.2f} in layer {layers[furthest]} (0: chance, 1: no expert in common)"
    )
    add_title(figure, f"Experts of image and of text tokens at step {step}", summary)
    return figure

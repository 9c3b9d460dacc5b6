# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of which experts serve image tokens and which serve text, for the backends that show images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.routing.metrics.modalities import modality_separation, specialization
from nemo_rl_moe.runs.loggers.figures import BOTTOM, LEFT, RIGHT, TOP, add_title, as_png, axes_at, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODALITY_KEY = "plots/experts_by_modality"
_WIDTH, _MOST_HEIGHT, _LEAST_HEIGHT, _HEIGHT_OF_LAYER = 800, 900, 160, 40
_MOST_CELLS_WITH_TEXT = 200
_MOST_EXPERTS_WITH_TEXT = 20
_STRONG = 0.6
"""Leaning from which a cell is dark."""


def modality_plots(
    step: int,
    layers: Sequence[int],
    counts: Int[np.ndarray, "layers experts"],
    image_counts: Int[np.ndarray, "layers experts"],
    topk: int | None,
) -> dict[str, bytes]:
    """Plot a step as a PNG file, by its key; none of a step with tokens of one kind alone."""
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
    """Leaning of each expert, red to image tokens and blue to text, with the share of image tokens in each cell."""
    num_layers, num_experts = counts.shape
    height = min(max(_HEIGHT_OF_LAYER * num_layers, _LEAST_HEIGHT), _MOST_HEIGHT)
    figure = new_figure((LEFT + _WIDTH + RIGHT, TOP + height + BOTTOM))
    axes = axes_at(figure, LEFT, TOP, _WIDTH, height)
    axes.set_facecolor("0.6")  # no token
    leaning = specialization(counts, image_counts, topk)
    image = axes.imshow(
        np.ma.masked_invalid(leaning), aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-1, vmax=1
    )
    every = max(1, -(-num_layers // 24))
    axes.set_yticks(range(0, num_layers, every), labels=[str(layer) for layer in layers[::every]])
    axes.set(xlabel="expert (cell: share of its tokens that are image tokens)", ylabel="layer")
    axes.locator_params(axis="x", integer=True)
    if num_experts <= _MOST_EXPERTS_WITH_TEXT and counts.size <= _MOST_CELLS_WITH_TEXT:
        _write_shares(axes, counts, image_counts, leaning)
    else:
        axes.set_xlabel("expert")
    bar = figure.colorbar(image, cax=axes_at(figure, LEFT + _WIDTH + 16, TOP, 16, height), ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["text only", "as overall", "image only"])
    separation = modality_separation(counts, image_counts, topk)
    furthest = int(np.nanargmax(separation))
    summary = (
        f"image tokens: {image_counts.sum() / counts.sum():.1%} overall;  separation: {np.nanmean(separation):.2f} on "
        f"average, {separation[furthest]:.2f} in layer {layers[furthest]} (0: chance, 1: no expert in common)"
    )
    add_title(figure, f"Experts of image and of text tokens at step {step}", summary)
    return figure


def _write_shares(
    axes: "Axes",
    counts: Int[np.ndarray, "layers experts"],
    image_counts: Int[np.ndarray, "layers experts"],
    leaning: np.ndarray,
) -> None:
    for (row, expert), count in np.ndenumerate(counts):
        if count:
            color = "white" if abs(leaning[row, expert]) > _STRONG else "black"
            share = f"{image_counts[row, expert] / count:.0%}"
            axes.text(expert, row, share, ha="center", va="center", fontsize=9, color=color)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of which experts serve responses of high and of low advantage, for the backends that show images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from nemo_rl_moe.runs.loggers.figures import BOTTOM, LEFT, RIGHT, TOP, add_title, as_png, axes_at, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADVANTAGE_KEY = "plots/experts_by_advantage"
_WIDTH, _MOST_HEIGHT, _LEAST_HEIGHT, _HEIGHT_OF_LAYER = 800, 900, 160, 40
_LEAST_SPAN = 4.0
"""Scores that the scale reaches at least: of many experts some reach 4 by chance, which is not to look like much."""


def advantage_plots(step: int, layers: Sequence[int], scores: Float[np.ndarray, "layers experts"]) -> dict[str, bytes]:
    """Return the plot as a PNG file, by the key under which it is logged; none without a score."""
    if np.isnan(scores).all():
        return {}
    return {ADVANTAGE_KEY: as_png(draw_advantages(step, layers, scores))}


def draw_advantages(step: int, layers: Sequence[int], scores: Float[np.ndarray, "layers experts"]) -> "Figure":
    """Return the score of each expert: red where it serves responses of high advantage beyond chance, blue of low."""
    num_layers, num_experts = scores.shape
    height = min(max(_HEIGHT_OF_LAYER * num_layers, _LEAST_HEIGHT), _MOST_HEIGHT)
    figure = new_figure((LEFT + _WIDTH + RIGHT, TOP + height + BOTTOM))
    axes = axes_at(figure, LEFT, TOP, _WIDTH, height)
    axes.set_facecolor("0.6")  # no score
    largest = float(np.nanmax(np.abs(scores)))
    span = max(largest, _LEAST_SPAN)
    image = axes.imshow(
        np.ma.masked_invalid(scores), aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=-span, vmax=span
    )
    every = max(1, -(-num_layers // 24))
    axes.set_yticks(range(0, num_layers, every), labels=[str(layer) for layer in layers[::every]])
    axes.set(xlabel="expert", ylabel="layer")
    bar = figure.colorbar(image, cax=axes_at(figure, LEFT + _WIDTH + 16, TOP, 16, height))
    bar.set_label("standard deviations from chance")
    layer, expert = divmod(int(np.nanargmax(np.abs(scores))), num_experts)
    excess = float(np.nanmean(np.square(scores))) - 1
    summary = (
        f"furthest: layer {layers[layer]}, expert {expert}, {scores[layer, expert]:+.1f};"
        f"  mean square {excess:+.2f} beyond chance"
    )
    add_title(figure, f"Experts by advantage at step {step}", summary)
    return figure

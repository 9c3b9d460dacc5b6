# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots of how far training agrees with the routes of the rollouts, for the backends that show images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from nemo_rl_moe.routing.agreement.row_kinds import Row
from nemo_rl_moe.runs.loggers.figures import BOTTOM, TOP, add_title, as_png, axes_at, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGREEMENT_KEY = "plots/routing_agreement"
_LEAST_SPAN = 0.01
"""Least height of the axis: agreement in all rows but one in a thousand is not to look like none."""


def routing_plots(step: int, layers: Sequence[int], rows: Int[np.ndarray, "layers kinds"]) -> dict[str, bytes]:
    """Return the plot as a PNG file, by the key under which it is logged; none without usable rows."""
    if not rows[:, Row.USABLE].any():
        return {}
    return {AGREEMENT_KEY: as_png(draw_agreement(step, layers, rows))}


def draw_agreement(step: int, layers: Sequence[int], rows: Int[np.ndarray, "layers kinds"]) -> "Figure":
    """Plot the agreement of each layer with the experts that it took, and that it would choose."""
    figure = new_figure((1000, 560))
    axes = axes_at(figure, 80, TOP, 880, 560 - TOP - BOTTOM)
    known = np.flatnonzero(rows[:, Row.USABLE])
    usable = rows[known, Row.USABLE]
    live, taken = rows[known, Row.LIVE_SAME] / usable, rows[known, Row.TAKEN_SAME] / usable
    axes.plot(known, taken, color="#2166ac", linewidth=1, marker="s", markersize=5, label="as training took them")
    axes.plot(known, live, color="#b2182b", linewidth=1, marker="o", markersize=5, label="as routers would choose")
    lowest = min(live.min(), taken.min())
    axes.set_ylim(max(0.0, 1 - max(1.15 * (1 - lowest), _LEAST_SPAN)), 1 + 0.05 * max(1 - lowest, _LEAST_SPAN))
    axes.set_xlim(-0.5, len(layers) - 0.5)
    every = max(1, -(-len(layers) // 24))
    axes.set_xticks(range(0, len(layers), every), labels=[str(layer) for layer in layers[::every]])
    axes.set(xlabel="layer", ylabel="share of rows with the experts of the rollout")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.legend(loc="best", frameon=False)
    worst = int(known[live.argmin()])
    expected, found = int(rows[:, Row.EXPECTED].sum()), int(usable.sum())
    summary = f"lowest: layer {layers[worst]}, {live.min():.4f} by itself;  {found:,} of {expected:,} rows usable"
    add_title(figure, f"Agreement with the routes of the rollouts at step {step}", summary)
    return figure

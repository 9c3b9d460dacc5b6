# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plot of a step's tokens by their lag, the age in optimizer steps of the weights that sampled them."""

from typing import TYPE_CHECKING

import numpy as np

from nemo_rl_moe.runs.folder.by_lag import LagTable
from nemo_rl_moe.runs.loggers.plots import LEFT, TOP, add_title, as_png, axes_at, new_figure
from nemo_rl_moe.shapes import Float
from nemo_rl_moe.token_lag import LAG_CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAG_KEY = "plots/by_lag"
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 400, 210, 90, 80
_BLUE, _RED = "#2166ac", "#b2182b"


def lag_plots(step: int, table: LagTable) -> dict[str, bytes]:
    """Return key -> PNG file of a plot of a step's tokens by lag (see `draw_lags`). Empty without tokens."""
    if not np.any(table.of["num_valid_tokens"]):
        return {}
    return {LAG_KEY: as_png(draw_lags(step, table))}


def draw_lags(step: int, table: LagTable) -> "Figure":
    """Return a plot with four panels, each over the lag of tokens.

    Lag is the number of optimizer steps between the weights that sampled a token and the weights that train on it.
    The panels show the number of tokens, the divergence of rollout and training with its parts, the loss of effective
    samples, and the disagreement of routes (clipping if routes are unknown).
    """
    figure = new_figure((LEFT + 2 * _WIDTH + _GAP_X + 40, TOP + 2 * _HEIGHT + _GAP_Y + 64))
    panels = [
        axes_at(figure, LEFT + column * (_WIDTH + _GAP_X), TOP + 16 + row * (_HEIGHT + _GAP_Y), _WIDTH, _HEIGHT)
        for row in range(2)
        for column in range(2)
    ]
    tokens = table.of["num_valid_tokens"]
    shares = tokens / tokens.sum()
    _bars(panels[0], shares, "share of the trained tokens")
    _divergence(panels[1], table)
    _bars(panels[2], 1 - table.of["effective_samples"], "share of the effective samples that is lost")
    if np.isnan(table.of["live_agreement"]).all():
        _bars(panels[3], table.of["clip_fraction"], "share of tokens that are clipped")
    else:
        _bars(panels[3], 1 - table.of["live_agreement"], "share of rows with other experts than the rollout's")
    for panel in panels[2:]:
        panel.set_xlabel("lag in optimizer steps")
    oldest = LAG_CLASSES[int(np.flatnonzero(tokens)[-1])].replace("_", " ")
    summary = f"{1 - shares[0]:.0%} of {tokens.sum():,.0f} tokens are older than the weights; largest lag: {oldest}"
    add_title(figure, f"Staleness of the tokens of step {step}", summary)
    return figure


def _divergence(axes: "Axes", table: LagTable) -> None:
    """Draw the divergence of each class of lags as stacked parts: mismatch of the engines, and above it staleness."""
    divergence, title = table.of["gen_kl_error"], "divergence of rollout and training"
    if np.isnan(table.of["kl_staleness"]).all():  # no step had a token without lag
        _bars(axes, divergence, title)
        return
    stale = np.nan_to_num(table.of["kl_staleness"])
    _bars(axes, divergence - stale, title, label="mismatch of the engines, as at lag 0")
    axes.bar(range(len(LAG_CLASSES)), stale, bottom=divergence - stale, color=_RED, width=0.7, label="staleness")
    axes.legend(loc="best", frameon=False)
    axes.relim()
    axes.autoscale_view()


def _bars(axes: "Axes", values: Float[np.ndarray, " classes"], title: str, label: str | None = None) -> None:
    axes.bar(range(len(LAG_CLASSES)), values, color=_BLUE, width=0.7, label=label)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlim(-0.6, len(LAG_CLASSES) - 0.4)
    axes.set_xticks(range(len(LAG_CLASSES)), labels=[name.replace("_", " ") for name in LAG_CLASSES])
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Heatmap of one step's expert load in the terminal. Cells are merged if the terminal is too small."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from rich.color import Color
from rich.style import Style
from rich.text import Span, Text

from nemo_rl_moe.routing.metrics.load_arrays import dead, utilization
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.loggers.expert_load_plots import ANCHORS, MOST_DOUBLINGS

# Colours other than black and white, since the terminal's background may be black or white.
_DEAD, _UNUSED = (255, 221, 0), (120, 120, 120)
_COLORS_OF_A_DOUBLING = 12
_DEAD_LEVEL, _UNUSED_LEVEL = -1, -2
_WIDEST_CELL, _LEAST_CELL_WITH_NUMBER = 7, 6
_SYMBOLS = ((0.5, "="), (0.8, "-"), (1.25, "."), (2.0, "+"), (4.0, "*"))
_HIGHEST_SYMBOL, _DEAD_SYMBOL, _UNUSED_SYMBOL = "#", "x", " "


def terminal_heatmap(load: ExpertLoadHistory, width: int, height: int, in_color: bool) -> list[Text]:
    """Return the lines of the heatmap, with title, legend, and a line about the busiest and the dead experts."""
    counts, layers, step = load.counts[-1], load.layers.tolist(), int(load.steps[-1])
    loads = utilization(counts)
    shares = np.where(counts.sum(-1, keepdims=True) > 0, loads, np.nan)
    num_layers, num_experts = shares.shape
    label_width = 1 + 2 * len(str(max(layers)))
    columns = max(1, min(num_experts, width - label_width - 1))
    cell_width = max(1, min((width - label_width - 1) // columns, _WIDEST_CELL))
    # Other lines are the title, the legend, the extremes, and a note on merged cells.
    is_merged = columns < num_experts or num_layers > height - 3
    rows = max(1, min(num_layers, height - (4 if is_merged else 3)))
    cells = merged(shares, rows, columns)
    lines = [Text(f"expert load, step {step}: layers down, experts 0-{num_experts - 1} across")]
    for (first, end), shares_of_row in zip(pairwise(_edges(num_layers, rows)), cells, strict=True):
        name = f"{layers[first]}" if end == first + 1 else f"{layers[first]}-{layers[end - 1]}"
        lines.append(Text.assemble((f"{name:>{label_width}} ", "dim"), _row(shares_of_row, cell_width, in_color)))
    if is_merged:
        down, across = -(-num_layers // rows), -(-num_experts // columns)
        area = " x ".join(f"{n} {name}{'s' if n > 1 else ''}" for n, name in ((down, "layer"), (across, "expert")))
        lines.append(Text(f"each cell: the value farthest from 1 of {area}", style="dim"))
    if in_color or cell_width < _LEAST_CELL_WITH_NUMBER:
        lines.append(_legend(in_color))
    row, expert = divmod(int(loads.argmax()), num_experts)
    busiest = f"busiest: {loads.max():.2f} x fair, layer {layers[row]} expert {expert}"
    return [*lines, Text(f"dead: {int(dead(counts).sum()):,} of {loads.size:,}; {busiest}")]


def merged(shares: Float[np.ndarray, "layers experts"], rows: int, columns: int) -> Float[np.ndarray, "rows columns"]:
    """Return a smaller heatmap. A merged cell gets its most extreme value: 0 (dead), or the farthest from 1."""
    for axis, number in ((1, columns), (0, rows)):
        with np.errstate(divide="ignore"):
            deviation = np.where(np.isnan(shares), -1.0, np.abs(np.log2(shares)))
        positions = [
            np.expand_dims(first + deviation.take(range(first, end), axis).argmax(axis), axis)
            for first, end in pairwise(_edges(shares.shape[axis], number))
        ]
        shares = np.take_along_axis(shares, np.concatenate(positions, axis), axis)
    return shares


def load_color(share: float) -> Color:
    """Return the colour of a utilization on a logarithmic scale: blue below 1, red above. 0 is yellow, NaN grey."""
    if np.isnan(share):
        return _color_of(_UNUSED_LEVEL)
    if share == 0:
        return _color_of(_DEAD_LEVEL)
    doublings = min(max(float(np.log2(share)), -MOST_DOUBLINGS), MOST_DOUBLINGS)
    # There are few distinct colours, since each change of colour adds output to the terminal.
    return _color_of(round((doublings + MOST_DOUBLINGS) * _COLORS_OF_A_DOUBLING))


@lru_cache
def _color_of(level: int) -> Color:
    if level in (_DEAD_LEVEL, _UNUSED_LEVEL):
        return Color.from_rgb(*(_DEAD if level == _DEAD_LEVEL else _UNUSED))
    position = level / (2 * MOST_DOUBLINGS * _COLORS_OF_A_DOUBLING) * (len(ANCHORS) - 1)
    channels = zip(*ANCHORS, strict=True)
    return Color.from_rgb(*(round(float(np.interp(position, range(len(ANCHORS)), channel))) for channel in channels))


@lru_cache
def _style_on(background: Color) -> Style:
    """Return the style in which text is legible on a colour: black or white."""
    luminance = np.dot(background.get_truecolor(), (0.299, 0.587, 0.114))
    return Style(color=Color.from_rgb(*((255, 255, 255) if luminance < 128 else (0, 0, 0))), bgcolor=background)


def load_symbol(share: float) -> str:
    """Return the character that shows a utilization in a terminal without colours."""
    if np.isnan(share):
        return _UNUSED_SYMBOL
    if share == 0:
        return _DEAD_SYMBOL
    return next((symbol for limit, symbol in _SYMBOLS if share < limit), _HIGHEST_SYMBOL)


def _row(shares: Float[np.ndarray, " columns"], cell_width: int, in_color: bool) -> Text:
    labels = []
    for share in shares.tolist():
        if cell_width >= _LEAST_CELL_WITH_NUMBER and not np.isnan(share):
            number = "dead" if share == 0 else f"{share:.2f}" if share < 100 else f"{share:.0f}"
            labels.append(number[: cell_width - 1].rjust(cell_width - 1) + " ")
        else:
            symbol = load_symbol(share) if share == 0 or not in_color else " "
            labels.append(symbol.center(cell_width))
    if not in_color:
        return Text("".join(labels))
    spans = [
        Span(cell * cell_width, (cell + 1) * cell_width, _style_on(load_color(share)))
        for cell, share in enumerate(shares.tolist())
    ]
    return Text("".join(labels), spans=spans)


def _legend(in_color: bool) -> Text:
    if not in_color:
        return Text("x dead  = <0.5  - <0.8  . fair  + from 1.25  * 2  # 4", style="dim")
    legend = Text()
    for share, name in ((0.25, "1/4"), (0.5, "1/2"), (1.0, "fair"), (2.0, "2"), (4.0, "4 times"), (0.0, "dead")):
        symbol = _DEAD_SYMBOL if share == 0 else " "
        legend.append(f"{symbol} ", _style_on(load_color(share))).append(f" {name}  ")
    return legend


def _edges(number: int, parts: int) -> Sequence[int]:
    """Return the borders of `parts` nearly equal parts of a range."""
    return [number * part // parts for part in range(parts + 1)]

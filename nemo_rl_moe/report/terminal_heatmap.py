# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One step's expert load as lines of text: layers down, experts across, fitted to the room that there is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int
from rich.color import Color
from rich.style import Style
from rich.text import Span, Text

from nemo_rl_moe.loggers.pictures import ANCHORS, MOST_DOUBLINGS
from nemo_rl_moe.moe.load_arrays import dead, utilization

# A terminal may be black or white itself, and a half of a line has no room for a mark.
_DEAD, _UNUSED = (255, 221, 0), (120, 120, 120)
_COLORS_OF_A_DOUBLING = 12
_DEAD_LEVEL, _UNUSED_LEVEL = -1, -2
_WIDEST_CELL, _LEAST_CELL_WITH_NUMBER = 7, 6
_SYMBOLS = ((0.5, "="), (0.8, "-"), (1.25, "."), (2.0, "+"), (4.0, "*"))
_MOST, _DEAD_SYMBOL, _UNUSED_SYMBOL = "#", "x", " "
_HALF_BLOCK = "▀"


@dataclass(frozen=True)
class StepLoad:
    """The load of one step.

    Attributes:
        step: The step.
        layers: Index of each MoE layer in the whole model.
        counts: Assignments that each expert got.
    """

    step: int
    layers: Sequence[int]
    counts: Int[np.ndarray, "layers experts"]


@dataclass(frozen=True)
class Fit:
    """How a load matrix is brought into some room.

    Attributes:
        rows: Rows of cells.
        columns: Cells of a row.
        cell_width: Characters of a cell.
        rows_of_a_line: 1, or 2 where a line shows two rows of cells as its upper and its lower half.
    """

    rows: int
    columns: int
    cell_width: int
    rows_of_a_line: int

    @property
    def lines(self) -> int:
        """Lines of text."""
        return -(-self.rows // self.rows_of_a_line)


def fit(num_layers: int, num_experts: int, width: int, height: int, has_halves: bool) -> Fit:
    """A line for each layer where there are enough, else half a line, else several layers for a row; experts likewise.

    Args:
        num_layers: Layers.
        num_experts: Experts of each.
        width: Characters of a line.
        height: Lines.
        has_halves: Whether the terminal can show the halves of a line in colours of their own.
    """
    columns = max(1, min(num_experts, width))
    cell_width = max(1, min(width // columns, _WIDEST_CELL))
    rows_of_a_line = 2 if has_halves and num_layers > height else 1
    rows = max(1, min(num_layers, height * rows_of_a_line))
    # Halves have no room for numbers, and wide ones would be no squares.
    return Fit(rows, columns, min(cell_width, 2) if rows_of_a_line == 2 else cell_width, rows_of_a_line)


def merged(shares: Float[np.ndarray, "layers experts"], rows: int, columns: int) -> Float[np.ndarray, "rows columns"]:
    """Fewer cells, each the one of its cells that is farthest from 1, as a factor; a dead one is farther than all.

    Args:
        shares: Utilization; NaN for a layer without load, which gives way to all others.
        rows: At most the number of layers.
        columns: At most the number of experts.
    """
    for axis, number in ((1, columns), (0, rows)):
        with np.errstate(divide="ignore"):
            deviation = np.where(np.isnan(shares), -1.0, np.abs(np.log2(shares)))
        places = [
            np.expand_dims(first + deviation.take(range(first, end), axis).argmax(axis), axis)
            for first, end in pairwise(_edges(shares.shape[axis], number))
        ]
        shares = np.take_along_axis(shares, np.concatenate(places, axis), axis)
    return shares


def load_colors(shares: Float[np.ndarray, "rows columns"]) -> list[list[Color]]:
    """The colour of each cell: half of the fair share is as blue as twice is red, 1 is white, dead is yellow."""
    with np.errstate(divide="ignore"):
        places = np.clip(np.log2(shares), -MOST_DOUBLINGS, MOST_DOUBLINGS)
    # Steps of colour, so that there are few of them: a terminal is told of each by itself.
    levels = np.round((np.nan_to_num(places) + MOST_DOUBLINGS) * _COLORS_OF_A_DOUBLING).astype(int)
    levels[shares == 0] = _DEAD_LEVEL
    levels[np.isnan(shares)] = _UNUSED_LEVEL
    return [[_color_of(level) for level in row] for row in levels.tolist()]


@lru_cache
def _color_of(level: int) -> Color:
    if level in (_DEAD_LEVEL, _UNUSED_LEVEL):
        return Color.from_rgb(*(_DEAD if level == _DEAD_LEVEL else _UNUSED))
    place = level / (2 * MOST_DOUBLINGS * _COLORS_OF_A_DOUBLING) * (len(ANCHORS) - 1)
    channels = zip(*ANCHORS, strict=True)
    return Color.from_rgb(*(round(float(np.interp(place, range(len(ANCHORS)), channel))) for channel in channels))


def load_symbol(share: float) -> str:
    """The same as a character, for terminals without colours."""
    if np.isnan(share):
        return _UNUSED_SYMBOL
    if share == 0:
        return _DEAD_SYMBOL
    return next((symbol for limit, symbol in _SYMBOLS if share < limit), _MOST)


def terminal_heatmap(load: StepLoad, width: int, height: int, in_color: bool, has_halves: bool) -> list[Text]:
    """The cells, and above and below them what they are.

    Args:
        load: The load.
        width: Characters of a line.
        height: Lines, those around the cells included.
        in_color: Whether the terminal has at least 256 colours.
        has_halves: Whether it has the character for the upper half of a line.
    """
    loads = utilization(load.counts)
    shares = np.where(load.counts.sum(-1, keepdims=True) > 0, loads, np.nan)
    num_layers, num_experts = shares.shape
    if 0 in shares.shape:
        return []
    label_width = 1 + 2 * len(str(max(load.layers)))
    room = width - label_width - 1
    halves = in_color and has_halves
    how = fit(num_layers, num_experts, room, height - _num_lines_around(False), halves)
    if (how.rows, how.columns) != shares.shape:
        how = fit(num_layers, num_experts, room, max(1, height - _num_lines_around(True)), halves)
    is_merged = (how.rows, how.columns) != shares.shape
    cells = merged(shares, how.rows, how.columns)
    lines = [Text(f"expert load, step {load.step}: layers down, experts 0-{num_experts - 1} across")]
    for name, of_line in zip(
        _names(load.layers, how),
        _cells_in_color(cells, how) if in_color else _cells_as_text(cells, how),
        strict=True,
    ):
        lines.append(Text.assemble((f"{name:>{label_width}} ", "dim"), of_line))
    if is_merged:
        lines.append(Text(_how_merged(num_layers, num_experts, how), style="dim"))
    if in_color or how.cell_width < _LEAST_CELL_WITH_NUMBER:
        lines.append(_legend(in_color))
    return [*lines, Text(_extremes(load, loads))]


def _num_lines_around(is_merged: bool) -> int:
    return 4 if is_merged else 3


def _cells_in_color(shares: Float[np.ndarray, "rows columns"], how: Fit) -> list[Text]:
    colors = load_colors(shares)
    lines = []
    for first in range(0, how.rows, how.rows_of_a_line):
        if how.rows_of_a_line == 2:
            below = colors[first + 1] if first + 1 < how.rows else [None] * how.columns
            styles = list(map(_style, colors[first], below))
            cells = [_HALF_BLOCK * how.cell_width] * how.columns
        else:
            styles = list(map(_style_on, colors[first]))
            cells = [
                _label(share, how.cell_width, _DEAD_SYMBOL if share == 0 else " ") for share in shares[first].tolist()
            ]
        edges = range(0, how.columns * how.cell_width, how.cell_width)
        spans = [Span(edge, edge + how.cell_width, style) for edge, style in zip(edges, styles, strict=True)]
        lines.append(Text("".join(cells), spans=spans))
    return lines


def _cells_as_text(shares: Float[np.ndarray, "rows columns"], how: Fit) -> list[Text]:
    return [
        Text("".join(_label(share, how.cell_width, load_symbol(share)) for share in row)) for row in shares.tolist()
    ]


@lru_cache(maxsize=8192)
def _style(color: Color, background: Color | None) -> Style:
    return Style(color=color, bgcolor=background)


@lru_cache
def _style_on(background: Color) -> Style:
    """Legible on it."""
    luminance = np.dot(background.get_truecolor(), (0.299, 0.587, 0.114))
    return _style(Color.from_rgb(*((255, 255, 255) if luminance < 128 else (0, 0, 0))), background)


def _label(share: float, width: int, symbol: str) -> str:
    """What stands in a cell: its number where there is room for it."""
    if width < _LEAST_CELL_WITH_NUMBER or np.isnan(share):
        return symbol.center(width)
    number = "dead" if share == 0 else f"{share:.2f}" if share < 100 else f"{share:.0f}"
    return number[: width - 1].rjust(width - 1) + " "


def _legend(in_color: bool) -> Text:
    if not in_color:
        text = "x dead  = <0.5  - <0.8  . fair  + from 1.25  * 2  # 4"
        return Text(text, style="dim")
    legend = Text()
    shares = (0.25, 0.5, 1.0, 2.0, 4.0, 0.0)
    (colors,) = load_colors(np.array([shares]))
    for share, color, name in zip(shares, colors, ("1/4", "1/2", "fair", "2", "4 times", "dead"), strict=True):
        legend.append(f"{_DEAD_SYMBOL} " if share == 0 else "  ", _style_on(color)).append(f" {name}  ")
    return legend


def _how_merged(num_layers: int, num_experts: int, how: Fit) -> str:
    down, across = -(-num_layers // how.rows), -(-num_experts // how.columns)
    layers, experts = (f"{n} {name}{'s' if n > 1 else ''}" for n, name in ((down, "layer"), (across, "expert")))
    return f"each cell: the farthest from 1 of {layers} x {experts}"


def _extremes(load: StepLoad, loads: Float[np.ndarray, "layers experts"]) -> str:
    row, expert = divmod(int(loads.argmax()), loads.shape[1])
    num_dead = int(dead(load.counts).sum())
    busiest = f"busiest: {loads.max():.2f} x fair, layer {load.layers[row]} expert {expert}"
    return f"dead: {num_dead:,} of {loads.size:,}; {busiest}"


def _names(layers: Sequence[int], how: Fit) -> list[str]:
    """Which layers each line shows."""
    edges = [*_edges(len(layers), how.rows)[:: how.rows_of_a_line], len(layers)]
    spans = [(layers[first], layers[end - 1]) for first, end in pairwise(edges) if end > first]
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]


def _edges(number: int, parts: int) -> list[int]:
    return [number * part // parts for part in range(parts + 1)]

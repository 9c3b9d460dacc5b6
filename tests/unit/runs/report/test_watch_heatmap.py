# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.text import Text

from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.report.terminal_heatmap import load_color, load_symbol, merged, terminal_heatmap

WHITE, YELLOW, GREY = (247, 247, 247), (255, 221, 0), (120, 120, 120)
BLUEST, REDDEST = (33, 102, 172), (178, 24, 43)


def load_of(
    rows: Sequence[Sequence[int]] | NDArray[np.int64], layers: Sequence[int] | None = None
) -> ExpertLoadHistory:
    return ExpertLoadHistory(np.array([5]), np.array(layers or range(len(rows))), np.array([rows]))


def backgrounds_of(line: Text) -> list[tuple[int, ...] | None]:
    """The background of every character that has a style of its own."""
    found: list[tuple[int, ...] | None] = []
    for span in line.spans:
        if not isinstance(span.style, str):
            color = span.style.bgcolor
            found += [tuple(color.get_truecolor()) if color else None] * (span.end - span.start)
    return found


def test_the_farthest_from_the_fair_share_stands_for_its_neighbours() -> None:
    shares = np.array([[1.0, 1.5, 0.5, 1.9], [1.2, 1.1, 0.9, 1.0], [3.0, 0.0, 1.0, 1.0], [np.nan] * 4])
    np.testing.assert_array_equal(merged(shares, 4, 2), [[1.5, 0.5], [1.2, 0.9], [0.0, 1.0], [np.nan, np.nan]])
    np.testing.assert_array_equal(merged(shares, 2, 2), [[1.5, 0.5], [0.0, 1.0]])
    np.testing.assert_array_equal(merged(shares, 4, 4), shares)


@given(st.data())
def test_merging_loses_no_outlier_and_invents_none(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    values = data.draw(st.lists(st.integers(0, 12), min_size=layers * experts, max_size=layers * experts))
    shares = np.array(values).reshape(layers, experts) / 4
    rows, columns = data.draw(st.integers(1, layers)), data.draw(st.integers(1, experts))
    found = merged(shares, rows, columns)
    assert found.shape == (rows, columns)
    assert set(found.flat) <= set(shares.flat)
    with np.errstate(divide="ignore"):
        assert np.abs(np.log2(found)).max() == np.abs(np.log2(shares)).max()


def test_colours_diverge_at_the_fair_share() -> None:
    *shares, dead, unused = map(load_color, (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 64.0, 0.0, np.nan))
    expected = [BLUEST, BLUEST, (146, 197, 222), WHITE, (244, 165, 130), REDDEST, REDDEST]
    assert [tuple(color.get_truecolor()) for color in shares] == expected
    assert (tuple(dead.get_truecolor()), tuple(unused.get_truecolor())) == (YELLOW, GREY)


@pytest.mark.parametrize(
    ("share", "symbol"),
    [(0, "x"), (0.49, "="), (0.5, "-"), (0.8, "."), (1.24, "."), (1.25, "+"), (2, "*"), (4, "#"), (np.nan, " ")],
)
def test_symbols(share: float, symbol: str) -> None:
    assert load_symbol(share) == symbol


def test_few_experts_have_their_numbers() -> None:
    lines = terminal_heatmap(load_of([[10, 30, 0, 0], [0, 0, 0, 0], [5, 5, 5, 5]], [1, 3, 12]), 60, 20, False)
    assert [line.plain.rstrip() for line in lines] == [
        "expert load, step 5: layers down, experts 0-3 across",
        "    1   1.00   3.00   dead   dead",
        "    3",
        "   12   1.00   1.00   1.00   1.00",
        "dead: 2 of 12; busiest: 3.00 x fair, layer 1 expert 1",
    ]


def test_many_experts_are_symbols_or_colours() -> None:
    counts = np.full((2, 40), 100)
    counts[0, 39], counts[1, 0] = 0, 1000
    plain = [line.plain for line in terminal_heatmap(load_of(counts), 60, 20, False)]
    assert plain[1] == f"  0 {'.' * 39}x"
    assert plain[2] == f"  1 #{'.' * 39}"
    assert plain[3].startswith("x dead")
    colored = terminal_heatmap(load_of(counts), 60, 20, True)
    assert colored[1].plain == f"  0 {' ' * 39}x"
    backgrounds = backgrounds_of(colored[2])
    assert backgrounds[0] == REDDEST
    assert backgrounds[1:] == [backgrounds[1]] * 39
    assert backgrounds_of(colored[1])[-1] == YELLOW


def test_what_is_merged_is_said() -> None:
    counts = np.full((8, 100), 10)
    counts[5, 77] = 0
    lines = [line.plain for line in terminal_heatmap(load_of(counts), 54, 8, False)]
    assert len(lines) == 8
    assert "each cell: the value farthest from 1 of 2 layers x 2 experts" in lines
    (row,) = (line for line in lines if "x" in line[4:] and line.startswith("4-5"))
    assert row[4 + 77 // 2] == "x"


@given(st.integers(1, 60), st.integers(1, 200), st.integers(20, 150), st.integers(5, 40), st.booleans())
def test_never_needs_more_room_than_there_is(
    layers: int, experts: int, width: int, height: int, in_color: bool
) -> None:
    lines = terminal_heatmap(load_of(np.ones((layers, experts), dtype=np.int64)), width, height, in_color)
    assert len(lines) <= height
    cells = [line for line in lines if re.match(r" *\d+(-\d+)? ", line.plain)]
    assert cells
    assert all(len(line.plain) <= width for line in cells)

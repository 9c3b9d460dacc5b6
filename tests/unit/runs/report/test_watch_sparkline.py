# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.runs.report.watch_frame import ASCII, BLOCKS, NOT_FINITE, sparkline


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 0], 8, "█▁"),
        ([0.0, 0.49, 0.5, 1.0], 9, "▁▄▅█"),
        ([0, 2, 6, 8], 2, "▁█"),  # means 1 and 7
        ([0, 0, 9, 0, 6], 2, "▁█"),  # two of five, then three: 0 and 5
        ([3, 3, 3], 9, "▅▅▅"),
        ([5], 1, "▅"),
        ([], 9, ""),
        ([1, 2], 0, ""),
        ([1, math.nan, 2], 3, "▁!█"),
        ([1, math.inf, 2, 2], 2, "!▅"),
        ([math.inf, -math.inf], 1, "!"),
    ],
)
def test_hand_worked(values: Sequence[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_other_levels() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, ASCII) == ASCII
    assert ASCII.isascii()


@given(st.lists(st.floats(), max_size=80), st.integers(0, 30))
def test_takes_any_numbers(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set(BLOCKS + NOT_FINITE)
    if all(math.isfinite(value) for value in values):
        assert NOT_FINITE not in line


@given(st.floats(-1e6, 1e6), st.integers(1, 500), st.integers(1, 60))
def test_what_does_not_change_is_level_however_many_steps_there_are(value: float, number: int, width: int) -> None:
    assert set(sparkline([value] * number, width)) == {"▅"}


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=60))
def test_higher_is_never_lower(values: list[int]) -> None:
    line = sparkline(values, len(values))
    heights = [height for _, height in sorted(zip(values, map(BLOCKS.index, line), strict=True))]
    assert heights == sorted(heights)

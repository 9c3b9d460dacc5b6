# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions in time, height and width, against positions worked out by hand."""

import pytest
import torch

from nemo_rl_moe.models.image_positions import image_positions


def positions(rows: list[str], grids: list[tuple[int, int]]) -> list[list[list[int]]]:
    """Return the positions of each axis, by row, for rows of `t` (text) and `i` (image tokens)."""
    mask = torch.tensor([[each == "i" for each in row] for row in rows])
    found: list[list[list[int]]] = image_positions(mask, grids).transpose(0, 1).tolist()
    return found


def test_a_image_counts_its_rows_and_columns_and_text_goes_on_behind_the_larger_side() -> None:
    (found,) = positions(["ttiiiiiitt"], [(2, 3)])
    assert found == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_images_of_several_rows_may_touch_each_other_and_begin_a_sequence() -> None:
    text, two, one = positions(["tttttt", "iiiiit", "tiiiit"], [(1, 2), (3, 1), (2, 2)])
    assert text == [[0, 1, 2, 3, 4, 5]] * 3
    assert two == [[0, 0, 2, 2, 2, 5], [0, 0, 2, 3, 4, 5], [0, 1, 2, 2, 2, 5]]
    assert one == [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]


@pytest.mark.parametrize(
    ("row", "grids"), [("tiit", [(2, 2)]), ("titiit", [(1, 3)]), ("tiii", [(1, 2)]), ("tii", [(1, 2), (1, 1)])]
)
def test_tokens_that_are_not_those_of_the_images_are_refused(row: str, grids: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="image tokens"):
        positions([row], grids)

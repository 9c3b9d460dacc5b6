# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.runs.folder.run_data import Series
from nemo_rl_moe.runs.folder.saved_samples import evenly_spaced
from nemo_rl_moe.runs.report.arrays import highest_of_stretches, thinned


@given(number=st.integers(0, 500), most=st.integers(1, 600))
def test_positions_are_evenly_spaced_and_end_with_the_last(number: int, most: int) -> None:
    chosen = evenly_spaced(number, most)
    assert len(chosen) == min(number, most)
    if number:
        assert chosen[-1] == number - 1
        assert chosen[0] >= 0
        gaps = np.diff(chosen)
        assert gaps.size == 0 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


values = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1, max_size=300)


@given(numbers=values, most=st.integers(6, 50))
def test_a_thinned_series_keeps_its_extremes_its_end_and_that_it_broke(numbers: list[float], most: int) -> None:
    series = Series(np.arange(1, len(numbers) + 1), np.array(numbers))
    kept = thinned(series, most)
    assert len(kept.steps) <= most
    np.testing.assert_array_equal(kept.values, series.values[kept.steps - 1])
    assert (np.diff(kept.steps) > 0).all()
    assert kept.steps[-1] == len(numbers)
    finite, kept_finite = series.values[np.isfinite(series.values)], kept.values[np.isfinite(kept.values)]
    if finite.size:
        assert (kept_finite.min(), kept_finite.max()) == (finite.min(), finite.max())
    assert np.isfinite(series.values).all() == np.isfinite(kept.values).all()


def test_what_is_short_stays_as_it_is() -> None:
    series = Series(np.array([3, 9]), np.array([1.0, 2.0]))
    assert thinned(series, 2) is series


def test_highest_of_stretches() -> None:
    rows = np.array([[1, 5], [2, 0], [9, 1], [0, 7], [3, 3]])
    last, highest = highest_of_stretches(rows, 3)
    assert last.tolist() == [1, 3, 4]
    assert highest.tolist() == [[2, 5], [9, 7], [3, 3]]


@pytest.mark.parametrize("most", [5, 9])
def test_few_rows_are_stretches_of_their_own(most: int) -> None:
    rows = np.array([[1, 5], [2, 0], [9, 1], [0, 7], [3, 3]])
    assert highest_of_stretches(rows, most)[1].tolist() == rows.tolist()

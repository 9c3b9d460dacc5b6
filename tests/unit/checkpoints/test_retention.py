# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are removed: by hand, and what holds whatever the values are."""

import math

from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.checkpoints.best_metric import steps_to_remove

values = st.one_of(st.none(), st.just(math.nan), st.floats(), st.sampled_from([0.0, 0.5, 1.0]))
checkpoints = st.dictionaries(st.integers(0, 50), values, max_size=12).map(lambda found: list(found.items()))


def test_by_hand() -> None:
    found = [(10, 0.5), (20, 0.9), (30, None), (40, 0.9), (50, math.nan), (60, 0.1)]
    # Best first: 40 (the newer of equals), 20, 10, 60, then 50 and 30, which have no value.
    assert steps_to_remove(found, 2, higher_is_better=True) == [10, 30, 50]
    assert steps_to_remove(found, 1, higher_is_better=True) == [10, 20, 30, 50]
    assert steps_to_remove(found, 5, higher_is_better=True) == [30]
    # Least first: 60, 10, 40, 20.
    assert steps_to_remove(found, 3, higher_is_better=False) == [20, 30, 50]
    assert steps_to_remove(found, None, higher_is_better=True) == []
    assert steps_to_remove([], 3, higher_is_better=True) == []


def test_without_values_the_newest_are_kept() -> None:
    assert steps_to_remove([(step, None) for step in (50, 10, 40, 20, 30)], 2, higher_is_better=True) == [10, 20, 30]


@given(checkpoints, st.integers(1, 5), st.booleans())
def test_what_always_holds(found: list[tuple[int, float | None]], keep: int, higher_is_better: bool) -> None:
    removed = steps_to_remove(found, keep, higher_is_better=higher_is_better)
    steps = {step for step, _ in found}
    kept = steps - set(removed)
    assert set(removed) <= steps
    assert len(removed) == len(set(removed))
    assert not found or max(steps) in kept
    assert min(keep, len(found)) <= len(kept) <= keep + 1
    # Whoever is removed is no better than any that is kept for its value.
    value_of = {step: value for step, value in found if value is not None and not math.isnan(value)}
    for step in removed:
        for other in kept - {max(steps)}:
            if step in value_of:
                better = value_of[step] > value_of[other] if higher_is_better else value_of[step] < value_of[other]
                assert not better
    left = [(step, value) for step, value in found if step in kept]
    assert not steps or steps_to_remove(left, keep + 1, higher_is_better=higher_is_better) == []

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The partition of sorted lengths against every other one, and what it saves of padding."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.length_partition import cheapest_partition
from tests.support.quick_list import examples

MAX_TOKENS = 24


def cost_of(lengths: list[int], ends: tuple[int, ...] | list[int], overhead: int) -> int:
    """Padded tokens and the overhead of each run."""
    starts = [0, *ends[:-1]]
    return sum((end - start) * max(lengths[start:end]) + overhead for start, end in zip(starts, ends, strict=True))


def every_partition(lengths: list[int], unit: int) -> list[tuple[int, ...]]:
    """Ends of all partitions into runs within the budget, in a number that is a multiple of the unit."""
    places = range(1, len(lengths))
    cuts = (cut for number in range(len(lengths)) for cut in combinations(places, number))
    found = []
    for cut in cuts:
        ends = (*cut, len(lengths))
        runs = [lengths[start:end] for start, end in zip((0, *cut), ends, strict=True)]
        if len(runs) % unit == 0 and all(max(run) * len(run) <= MAX_TOKENS for run in runs):
            found.append(ends)
    return found


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=9), st.integers(0, 12), st.sampled_from([1, 2, 3]))
def test_no_partition_is_cheaper(unsorted: list[int], overhead: int, unit: int) -> None:
    lengths = sorted(unsorted, reverse=True)
    others = every_partition(lengths, unit)
    if not others:
        return
    ends = cheapest_partition(lengths, MAX_TOKENS, overhead, unit)
    assert tuple(ends) in others
    least = min(cost_of(lengths, other, overhead) for other in others)
    assert cost_of(lengths, ends, overhead) == least
    assert len(ends) == min(len(other) for other in others if cost_of(lengths, other, overhead) == least)


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, MAX_TOKENS), min_size=2, max_size=6), st.integers(0, 12))
def test_neighbours_in_length_are_no_worse_than_any_other_sets(unsorted: list[int], overhead: int) -> None:
    """Over all ways to put sequences into any microbatches at all, by brute force."""

    def cheapest(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        longest, rest = left[0], left[1:]
        room = MAX_TOKENS // longest
        return min(
            longest * (size + 1) + overhead + cheapest(tuple(v for i, v in enumerate(rest) if i not in chosen))
            for size in range(min(room, len(left)))
            for chosen in combinations(range(len(rest)), size)
        )

    lengths = sorted(unsorted, reverse=True)
    assert cost_of(lengths, cheapest_partition(lengths, MAX_TOKENS, overhead, 1), overhead) == cheapest(tuple(lengths))


@pytest.mark.parametrize(("overhead", "ends"), [(0, [1, 3, 5]), (3, [1, 3, 5]), (4, [1, 5]), (40, [1, 5])])
def test_by_hand(overhead: int, ends: list[int]) -> None:
    # 20 | 6 6 | 4 4: 40 tokens. Without the second cut 44: it saves 4 tokens, and equal costs take fewer microbatches.
    assert cheapest_partition([20, 6, 6, 4, 4], MAX_TOKENS, overhead, 1) == ends


def test_padding_of_mixed_lengths() -> None:
    """Lognormal lengths, median 80, at most 500, 16 sequences a global batch, 2,048 tokens a microbatch."""
    generator = np.random.default_rng(0)
    real, computed, runs = 0, {}, {}
    for _ in range(30):
        lengths = sorted(np.exp(generator.normal(np.log(80), 0.9, 16)).clip(8, 500).astype(int).tolist(), reverse=True)
        real += sum(lengths)
        for overhead in (128, 10**6):
            ends = cheapest_partition(lengths, 2048, overhead, 1)
            computed[overhead] = computed.get(overhead, 0) + cost_of(lengths, ends, 0)
            runs[overhead] = runs.get(overhead, 0) + len(ends)
    assert (computed[10**6] / real, runs[10**6] / 30) == pytest.approx((1.50, 2.23), abs=0.01), "as few as possible"
    assert (computed[128] / real, runs[128] / 30) == pytest.approx((1.14, 4.23), abs=0.01)

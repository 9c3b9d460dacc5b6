# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.bin_packing import MOST_REFUSED, deal_by_work, first_fit_decreasing, split_evenly
from nemo_rl_moe.distributed.patch_limit import PatchRoom
from tests.support.quick_list import examples


def slow_first_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """The definition, word by word."""
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        for items in bins:
            if sum(sizes[other] for other in items) + sizes[item] <= capacity:
                items.append(item)
                break
        else:
            bins.append([item])
    return bins


def test_first_fit_by_hand():
    # 7 opens bin 0, 5 opens bin 1, 4 fits beside 5, 3 beside 7, 1 fits nowhere but beside 5 + 4.
    assert first_fit_decreasing([4, 7, 1, 5, 3], capacity=10) == [[1, 4], [3, 0, 2]]


@pytest.mark.parametrize("sizes", [[], [10], [10, 10, 10], [1]])
def test_first_fit_of_few(sizes: list[int]):
    assert first_fit_decreasing(sizes, capacity=10) == [[item] for item in range(len(sizes))]


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, 20), max_size=60))
def test_first_fit_is_the_definition(sizes: list[int]):
    assert first_fit_decreasing(sizes, capacity=20) == slow_first_fit_decreasing(sizes, 20)


def test_split_evenly_by_hand():
    assert split_evenly([6, 5, 4, 1]) == ([0, 3], [1, 2])


def test_a_bin_that_is_full_of_patches_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    has_room = PatchRoom.has_room_for
    monkeypatch.setattr(PatchRoom, "has_room_for", lambda *each: asked.append(1) or has_room(*each))
    count = 600
    bins = first_fit_decreasing([1] * count, count, [{number: 10} for number in range(count)], 10)
    assert len(bins) == count
    assert len(asked) <= MOST_REFUSED * count


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, 50), min_size=2, max_size=30))
def test_split_is_a_partition_within_one_item(sizes: list[int]):
    sizes.sort(reverse=True)
    left, right = split_evenly(sizes)
    assert left
    assert right
    assert sorted(left + right) == list(range(len(sizes)))
    assert abs(sum(sizes[i] for i in left) - sum(sizes[i] for i in right)) <= sizes[0]


def test_deal_by_hand():
    # Turns: (9, 7), (5, 4), (3, 2). Rank 1 is behind after the first turn and gets 5; then rank 1 has 12, rank 0 13.
    assert deal_by_work([9, 2, 7, 3, 5, 4], num_ranks=2) == [[0, 5, 1], [2, 4, 3]]


@settings(deadline=None, max_examples=examples(50))
@given(st.integers(1, 5), st.integers(0, 8), st.data())
def test_deal_gives_equal_counts_and_near_equal_work(num_ranks: int, turns: int, data: st.DataObject):
    count = num_ranks * turns
    work = data.draw(st.lists(st.integers(1, 100), min_size=count, max_size=count))
    dealt = deal_by_work(work, num_ranks)
    assert sorted(item for items in dealt for item in items) == list(range(count))
    assert {len(items) for items in dealt} == {turns}
    totals = [sum(work[item] for item in items) for items in dealt]
    assert max(totals) - min(totals) <= max(work, default=0)
    for turn in range(turns):  # neighbours in size run at the same time
        later = [work[items[t]] for items in dealt for t in range(turn + 1, turns)]
        assert min(work[items[turn]] for items in dealt) >= max(later, default=0)

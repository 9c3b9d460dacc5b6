# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Small combinatorial tools for planning microbatches: pure, deterministic, on plain lists of integers."""

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into few bins: the largest item first, each into the first bin that has room.

    Args:
        sizes: Size of each item, at least 1 and at most `capacity`.
        capacity: Most that the items of one bin may add up to.

    Returns:
        The items of each bin, largest first.
    """
    bins: list[list[int]] = []
    # A heap-shaped tree of maxima over the room left in each bin (an unopened bin has all its room), so that the first
    # bin with enough room is found in logarithmic time.
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    for item in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= sizes[item] else 2 * node + 1
        position = node - leaves
        if position == len(bins):
            bins.append([])
        bins[position].append(item)
        room[node] -= sizes[item]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def split_evenly(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Cuts positions in two parts that are both non-empty and add up to about the same.

    Args:
        sizes: Size of each item, largest first; at least two.
    """
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for position, size in enumerate(sizes):
        lighter = 0 if totals[0] <= totals[1] else 1
        halves[lighter].append(position)
        totals[lighter] += size
    return halves


def deal_by_work(work: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deals items to ranks so that every rank gets as many, and about the same work at each turn and in total.

    Ranks that share experts wait for each other in every microbatch, so the items of one turn are neighbours in size;
    within a turn the largest goes to the rank that has least so far.

    Args:
        work: Work of each item; their number is a multiple of `num_ranks`.
        num_ranks: Number of ranks.

    Returns:
        The items of each rank, most work first.
    """
    order = sorted(range(len(work)), key=lambda index: (-work[index], index))
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        least_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, item in zip(least_first, order[start : start + num_ranks], strict=True):
            dealt[rank].append(item)
            totals[rank] += work[item]
    return dealt

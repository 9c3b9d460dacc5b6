# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Packing of items into bins by size, splitting of bins, and their distribution over ranks."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from nemo_rl_moe.distributed.patch_limit import Images, PatchRoom
from nemo_rl_moe.errors import ConfigurationError

MOST_REFUSED = 64
"""Number of items that a bin refuses because of their image patches. After these, it is closed to all items."""


def round_up(length: int, multiple: int) -> int:
    """Return the length, rounded up to a multiple."""
    return -(-length // multiple) * multiple


def first_fit_decreasing(
    sizes: Sequence[int], capacity: int, images: Sequence[Images] = (), most_patches: int | None = None
) -> list[list[int]]:
    """Pack items into few bins: the largest item first, each into the first bin that has room.

    A bin that has refused `MOST_REFUSED` items because of their image patches gets no more items. Otherwise the time
    would be quadratic.

    Args:
        sizes: Size of each item, from 1 to `capacity`.
        images: Images of each item. Empty without any.
        most_patches: Maximum number of patches of the distinct images in a bin. A bin may exceed it if all its items
            have the same images. None for no limit.

    Returns:
        Items of each bin, largest first.
    """
    bins: list[list[int]] = []
    patch_rooms: list[PatchRoom] = []
    refused = Counter[int]()
    room = _RoomOfBins(len(sizes), capacity)
    for item in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        own = images[item] if images else {}
        full: list[int] = []
        for position in room.places_for(sizes[item]):
            if position == len(bins) or patch_rooms[position].has_room_for(own):
                break
            refused[position] += 1
            if refused[position] == MOST_REFUSED:
                full.append(position)
        if position == len(bins):
            bins.append([item])
            patch_rooms.append(PatchRoom(most_patches, own))
        else:
            bins[position].append(item)
            patch_rooms[position].add(own)
        room.take(position, sizes[item])
        for each in full:
            room.close(each)
    return bins


class _RoomOfBins:
    """Room left in each bin, for a search by size.

    A heap-shaped tree of maxima finds the next bin with enough room in logarithmic time.
    """

    def __init__(self, num_bins: int, capacity: int):
        self._leaves = 1 << max(num_bins - 1, 0).bit_length()
        self._room = [capacity] * (2 * self._leaves)

    def places_for(self, size: int) -> Iterator[int]:
        """Yield the indices of bins with room for an item of size `size`, in ascending order."""
        room, node = self._room, 1
        while room[node] >= size:
            while node < self._leaves:
                node = 2 * node if room[2 * node] >= size else 2 * node + 1
            yield node - self._leaves
            # Go up until the right neighbour has room, and to that neighbour.
            while node > 1 and (node % 2 or room[node + 1] < size):
                node //= 2
            if node == 1:
                return
            node += 1

    def close(self, position: int) -> None:
        self.take(position, self._room[position + self._leaves])

    def take(self, position: int, size: int) -> None:
        room, node = self._room, position + self._leaves
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])


def split_evenly(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split sizes into two parts of about the same sum. Return the indices of the sizes of each part.

    Requires two or more sizes, largest first.
    """
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for position, size in enumerate(sizes):
        lighter = 0 if totals[0] <= totals[1] else 1
        halves[lighter].append(position)
        totals[lighter] += size
    return halves


def deal_by_work(work: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Distribute items, such as microbatches, over ranks in rounds. In each round, every rank gets one item.

    The items of one round are similar in work, because ranks that share experts wait for each other in every
    microbatch. Within a round, the item with the most work goes to the rank with the least work so far, so that totals
    are similar.

    Args:
        work: Work of each item. The number of items is a multiple of `num_ranks`.

    Returns:
        Items of each rank, most work first.
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


def rounded_number(num_microbatches: int, unit: int, num_items: int) -> int:
    """Round a number of microbatches up to a multiple of `unit`. Raise an error if it then exceeds `num_items`."""
    target = round_up(num_microbatches, unit)
    if target > num_items:
        raise ConfigurationError(
            f"{num_items} sequences fill {num_microbatches} microbatches, which cannot become {target}, the next"
            f" multiple of {unit} that the ranks need; use a policy.train_global_batch_size that is a multiple of"
            f" {unit}"
        )
    return target


def split_until(
    bins: list[list[int]],
    unit: int,
    work: Callable[[list[int]], int],
    cut: Callable[[list[int]], tuple[Sequence[int], Sequence[int]]],
) -> list[list[int]]:
    """Split the bin with the most work, again and again, until the number of bins is a multiple of `unit`.

    Args:
        unit: The returned number of bins is a multiple of `unit`. The number of items is at least `unit`.
        work: Returns the work of a bin's items.
        cut: Splits a bin's items in two. Returns the positions of both parts in the list of items.
    """
    target = rounded_number(len(bins), unit, sum(map(len, bins)))
    # The first items differ, so that the lists are never compared and the order is deterministic.
    heap = [(-work(items), items[0], items) for items in bins if len(items) > 1]
    heapq.heapify(heap)
    done = [items for items in bins if len(items) == 1]
    while len(heap) + len(done) < target:
        _, _, fullest = heapq.heappop(heap)
        for positions in cut(fullest):
            part = [fullest[position] for position in positions]
            if len(part) == 1:
                done.append(part)
            else:
                heapq.heappush(heap, (-work(part), part[0], part))
    return sorted([items for _, _, items in heap] + done)

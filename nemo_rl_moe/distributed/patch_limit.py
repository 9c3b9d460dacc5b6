# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Limit on the patches of a microbatch's images, besides its tokens.

Equal images count once, as the vision tower runs them once. A microbatch stays within the limit, unless all its items
have the same images. Then it has no more patches than one item alone. A part of a valid microbatch is valid too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

Images = Mapping[int, int]
"""Id of an image of an item -> its number of patches."""


class PatchRoom:
    """Number of image patches of a microbatch to which items are added, up to a limit.

    Args:
        most: Maximum number of patches. None for no limit.
        first: Images of the item with which the microbatch begins.
    """

    def __init__(self, most: int | None, first: Images):
        self._most, self._first = most, first.keys()
        self._ids, self._patches = set(first), sum(first.values())

    def has_room_for(self, images: Images) -> bool:
        """Return whether an item with these images may join the microbatch."""
        # Items with the images of the first item add nothing. If those images exceed the limit, no others may join.
        if self._most is None or images.keys() == self._first:
            return True
        return self._patches + self._added(images) <= self._most

    def add(self, images: Images) -> None:
        self._patches += self._added(images)
        self._ids |= images.keys()

    def _added(self, images: Images) -> int:
        return sum(patches for number, patches in images.items() if number not in self._ids)


def most_neighbours(images: Sequence[Images], most: int | None) -> list[int]:
    """Return, for each item, the maximum number of consecutive items in a microbatch that begins with the item.

    Args:
        most: Maximum number of patches in a microbatch. None for no limit.
    """
    number = len(images)
    if most is None:
        return [number - start for start in range(number)]
    same = [1] * number
    for start in reversed(range(number - 1)):
        if images[start].keys() == images[start + 1].keys():
            same[start] += same[start + 1]
    found, inside = [], Counter[int]()
    end = patches = 0
    for start, own in enumerate(images):
        while end < number:
            added = sum(size for digest, size in images[end].items() if not inside[digest])
            if patches + added > most and end >= start + same[start]:
                break
            inside.update(images[end].keys())
            patches, end = patches + added, end + 1
        found.append(end - start)
        for digest, size in own.items():
            inside[digest] -= 1
            patches -= 0 if inside[digest] else size
    return found


def of_groups(images: Sequence[Images], group_size: int) -> list[Images]:
    """Return the images of each group of `group_size` consecutive sequences."""
    return [
        {number: size for own in images[start : start + group_size] for number, size in own.items()}
        for start in range(0, len(images), group_size)
    ]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that sequences share, such as images, and that are stored and transferred once.

Sequences refer to the same object, so that a pickle contains it once. A store keeps the array once: sequences have its
handle, and only readers of the array fetch it.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Shaped

from nemo_rl_moe.distributed.stored_rows import Fetch, StoredRows, put_together

SharedArray = Shaped[np.ndarray, " values"] | StoredRows
"""An array, or the handle of a stored array. Such a handle has exactly one `Piece`, the entire array."""


@dataclass(frozen=True)
class SharedColumn:
    """One model input of a batch, such as images, with any number of arrays for each sequence.

    Sequences may share arrays.
    """

    arrays: tuple[tuple[SharedArray, ...], ...]

    def select(self, indices: Sequence[int]) -> "SharedColumn":
        return replace(self, arrays=tuple(self.arrays[index] for index in indices))

    def fetched(self, fetch: Fetch) -> "SharedColumn":
        of = fetch_arrays((array for arrays in self.arrays for array in arrays), fetch)
        return replace(self, arrays=tuple(tuple(of[id(array)] for array in arrays) for arrays in self.arrays))


def num_bytes_of(array: SharedArray) -> int:
    return array.num_bytes if isinstance(array, StoredRows) else array.nbytes


def fetch_arrays(arrays: Iterable[SharedArray], fetch: Fetch) -> dict[int, Shaped[np.ndarray, " values"]]:
    """Fetch each stored array once. Return a dictionary from `id(entry)` to the array, for each entry of `arrays`."""
    found, pieces = {}, {}
    for array in arrays:
        if isinstance(array, StoredRows):
            (pieces[id(array)],) = array.pieces
        else:
            found[id(array)] = array
    sources = {id(piece.source): piece.source for piece in pieces.values()}
    stored = dict(zip(sources, fetch(list(sources.values())), strict=True))
    for key, piece in pieces.items():
        source = stored[id(piece.source)]
        if source is None:
            raise ValueError("an array that sequences share, such as an image, is lost: its store has ended")
        found[key] = source[piece.first : piece.first + piece.num_rows]
    return found


class ArrayStore:
    """Store of arrays that sequences share. Each array is stored once, and is freed when this process drops it.

    Args:
        put: Puts an array into the store, and returns a handle whose deletion frees it.
    """

    def __init__(self, put: Callable[[Shaped[np.ndarray, " values"]], Any]):
        self._put = put
        self._stored: dict[int, StoredRows] = {}

    def place(self, columns: Sequence[Sequence[SharedArray]]) -> tuple[tuple[SharedArray, ...], ...]:
        """Store the arrays of each sequence, unless they are stored already. Return the handles for each sequence."""
        new = {
            id(array): array
            for arrays in columns
            for array in arrays
            if not isinstance(array, StoredRows) and id(array) not in self._stored
        }
        for (key, array), rows in zip(new.items(), put_together(list(new.values()), self._put), strict=True):
            self._stored[key] = rows
            # Another array may get the same id afterwards.
            weakref.finalize(array, self._stored.pop, key, None).atexit = False
        return tuple(
            tuple(array if isinstance(array, StoredRows) else self._stored[id(array)] for array in arrays)
            for arrays in columns
        )

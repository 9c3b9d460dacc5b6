# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that sequences share, such as images: each is stored and transferred once.

Sequences share the same object, so that a pickle holds it once. In a store it lies apart from the sequences, which
carry its handle, and only its readers fetch it.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Shaped

from nemo_rl_moe.distributed.stored_rows import Fetch, StoredRows, put_together

SharedArray = Shaped[np.ndarray, " values"] | StoredRows
"""An array at hand, or the place where it is stored, as one piece."""


@dataclass(frozen=True)
class SharedColumn:
    """A column for the model of arrays that sequences may share: for each sequence as many as it has."""

    arrays: tuple[tuple[SharedArray, ...], ...]

    def select(self, indices: Sequence[int]) -> "SharedColumn":
        """Return the column of some of the sequences, in that order."""
        return replace(self, arrays=tuple(self.arrays[index] for index in indices))

    def fetched(self, fetch: Fetch) -> "SharedColumn":
        """Return the column with all arrays at hand.

        Raises:
            ValueError: A stored array is lost.
        """
        of = fetch_arrays((array for arrays in self.arrays for array in arrays), fetch)
        return replace(self, arrays=tuple(tuple(of[id(array)] for array in arrays) for arrays in self.arrays))


def num_bytes_of(array: SharedArray) -> int:
    return array.num_bytes if isinstance(array, StoredRows) else array.nbytes


def fetch_arrays(arrays: Iterable[SharedArray], fetch: Fetch) -> dict[int, Shaped[np.ndarray, " values"]]:
    """Fetch arrays, each once; return them by the identity of their handles.

    Raises:
        ValueError: A stored array is lost.
    """
    found, pieces = {}, {}
    for array in arrays:
        if isinstance(array, StoredRows):
            (pieces[id(array)],) = array.pieces
        else:
            found[id(array)] = array
    sources = {id(piece.source): piece.source for piece in pieces.values()}
    stored = dict(zip(sources, fetch(list(sources.values())), strict=True))
    for key, piece in pieces.items():
        whole = stored[id(piece.source)]
        if whole is None:
            raise ValueError("an array that sequences share, such as an image, is lost: its store has ended")
        found[key] = whole[piece.first : piece.first + piece.num_rows]
    return found


class ArrayStore:
    """Store that holds each shared array once as long as it is in use here.

    Args:
        put: Puts an array into the store; returns its handle, whose end frees it.
    """

    def __init__(self, put: Callable[[Shaped[np.ndarray, " values"]], Any]):
        self._put = put
        self._stored: dict[int, StoredRows] = {}

    def place(self, columns: Sequence[Sequence[SharedArray]]) -> tuple[tuple[SharedArray, ...], ...]:
        """Return the handles of arrays, and put those that are not stored yet."""
        new = {
            id(array): array
            for arrays in columns
            for array in arrays
            if not isinstance(array, StoredRows) and id(array) not in self._stored
        }
        for (key, array), rows in zip(new.items(), put_together(list(new.values()), self._put), strict=True):
            self._stored[key] = rows
            # Another array may get its identity afterwards.
            weakref.finalize(array, self._stored.pop, key, None).atexit = False
        return tuple(
            tuple(array if isinstance(array, StoredRows) else self._stored[id(array)] for array in arrays)
            for arrays in columns
        )

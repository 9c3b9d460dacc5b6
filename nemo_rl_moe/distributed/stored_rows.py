# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values of tokens in a store between their producer and their reader.

Large values, such as routed experts, are transferred from an engine to the trainer's ranks in Ray's object store. The
driver only has references.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

Fetch = Callable[[Sequence[Any]], Sequence[Shaped[np.ndarray, "rows ..."] | None]]
"""Function that returns an array for each handle, or None if the array is lost. If the handles are the arrays
themselves, `list` is such a function."""


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return a type's name. It is cached, because numpy needs ten times the time in which a `Piece` is made."""
    return str(dtype)


class Piece(NamedTuple):
    """Successive rows of one stored array, for successive tokens of one sequence.

    Attributes:
        source: Handle, such as an `ObjectRef`, or the array itself.
        first: Index of the first row in the array.
        start: Token position, in the sequence, to which the first row belongs.
    """

    source: Any
    first: int
    start: int
    num_rows: int

    @property
    def end(self) -> int:
        """Position after the token of the last row."""
        return self.start + self.num_rows

    def since(self, start: int) -> "Piece":
        """Return the part of this piece for tokens from position `start` on."""
        skipped = max(0, start - self.start)
        return Piece(self.source, self.first + skipped, self.start + skipped, self.num_rows - skipped)


@dataclass(frozen=True)
class StoredRows:
    """Handle of one sequence's stored rows, with at most one row (values of any shape) per token.

    The pieces do not overlap, and are in the order of the tokens.
    """

    pieces: tuple[Piece, ...]
    row_shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, rows: Shaped[np.ndarray, "tokens ..."]) -> "StoredRows":
        """Return a handle that holds an array itself. Row `i` of the array belongs to token `i` of the sequence."""
        return cls((Piece(rows, 0, 0, len(rows)),), rows.shape[1:], _name_of(rows.dtype))

    @property
    def end(self) -> int:
        """Position after the last token that has a row."""
        return self.pieces[-1].end if self.pieces else 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all rows after a fetch. They may be stored in a narrower type."""
        return sum(piece.num_rows for piece in self.pieces) * prod(self.row_shape) * np.dtype(self.dtype).itemsize

    def moved(self, by: int) -> "StoredRows":
        """Return the same rows, each assigned to the token that is `by` positions later in the sequence."""
        return replace(self, pieces=tuple(piece._replace(start=piece.start + by) for piece in self.pieces))

    def before(self, end: int) -> "StoredRows":
        """Return only the rows of tokens before a position."""
        kept = (piece._replace(num_rows=min(piece.num_rows, end - piece.start)) for piece in self.pieces)
        return replace(self, pieces=tuple(piece for piece in kept if piece.num_rows > 0))

    def followed_by(self, later: "StoredRows") -> "StoredRows":
        """Return these rows and the rows in `later` for tokens after them. These rows win if a token has both."""
        more = tuple(piece.since(self.end) for piece in later.pieces if piece.end > self.end)
        return replace(self, pieces=self.pieces + more)


def put_together(
    arrays: Sequence[Shaped[np.ndarray, "tokens ..."]],
    put: Callable[[Shaped[np.ndarray, "rows ..."]], Any],
    most_bytes: int = 1 << 20,
) -> list[StoredRows]:
    """Store the rows of several sequences, and return a handle for each sequence.

    Short sequences share an array, because each stored array has a cost. Shared arrays are small, because a reader of
    one sequence fetches the full array over the network. int16 numbers that all fit int8, such as ids of up to 128
    experts, are stored as int8.

    Args:
        arrays: Rows of each sequence from its first token on, all of one type and row shape.
        put: Puts an array into the store, and returns its handle.
        most_bytes: Maximum size in bytes of an array that several sequences share.
    """
    found: list[StoredRows] = []
    start = 0
    while start < len(arrays):
        end, num_bytes = start + 1, arrays[start].nbytes
        while end < len(arrays) and num_bytes + arrays[end].nbytes <= most_bytes:
            num_bytes += arrays[end].nbytes
            end += 1
        together = arrays[start:end]
        source, first = put(narrowed(np.concatenate(together))), 0
        for array in together:
            found.append(StoredRows((Piece(source, first, 0, len(array)),), array.shape[1:], _name_of(array.dtype)))
            first += len(array)
        start = end
    return found


def narrowed(rows: Shaped[np.ndarray, "rows ..."]) -> Shaped[np.ndarray, "rows ..."]:
    """Return int16 numbers as int8 if all of them fit. Return other arrays unchanged."""
    bounds = np.iinfo(np.int8)
    if rows.dtype != np.int16 or not rows.size or rows.max() > bounds.max or rows.min() < bounds.min:
        return rows
    return rows.astype(np.int8)


@dataclass(frozen=True)
class RowStore:
    """Store of rows between the process that computes them and their readers.

    Attributes:
        fetch: Takes handles, and returns the stored arrays.
        put: Puts an array into the store and returns its handle. If None, the handles are the arrays themselves, which
            only works within one process.
    """

    fetch: Fetch = list
    put: Callable[[Shaped[np.ndarray, "rows ..."]], Any] | None = None

    def keep(self, arrays: Sequence[Shaped[np.ndarray, "tokens ..."]]) -> list[StoredRows]:
        """Store each sequence's rows, from its first token on, all of one type and shape. Return a handle for each."""
        return [StoredRows.of(rows) for rows in arrays] if self.put is None else put_together(arrays, self.put)


IN_PLACE = RowStore()


def fetch_rows(
    sequences: Sequence[StoredRows | None],
    longest: int,
    fill: float,
    fetch: Fetch,
    row_shape: tuple[int, ...],
    dtype: str,
) -> Shaped[np.ndarray, "sequences longest ..."]:
    """Fetch the stored rows of sequences into one array, padded to `longest` tokens.

    Args:
        fill: Value for tokens without a row, and for tokens whose array is lost.
    """
    values = np.full((len(sequences), longest, *row_shape), fill, dtype=dtype)
    sources = {id(piece.source): piece.source for rows in sequences if rows is not None for piece in rows.pieces}
    arrays = dict(zip(sources, fetch(list(sources.values())), strict=True))
    expected = np.dtype(dtype)  # comparing names for each of hundreds of short sequences would take longer
    for number, rows in enumerate(sequences):
        for source, first, start, num_rows in rows.pieces if rows is not None else ():
            array = arrays[id(source)]
            if array is None:
                continue
            is_wider = array.dtype != expected and not np.can_cast(array.dtype, expected)
            if is_wider or array.shape[1:] != row_shape or len(array) < first + num_rows:
                got, wanted = array[first : first + num_rows], (num_rows, *row_shape)
                raise ValueError(f"stored rows: got {got.dtype} {got.shape}, expected {dtype} {wanted}")
            count = min(num_rows, longest - start)
            values[number, start : start + count] = array[first : first + count]
    return values

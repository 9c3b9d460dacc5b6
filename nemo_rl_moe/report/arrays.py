# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays of numbers inside a page: exact, and in about as few bytes as they can be told in."""

import base64
import gzip
from typing import Any

import numpy as np
from numpy.typing import NDArray

ArrayReference = dict[str, Any]
"""Where an array stands, as the page's script knows it: `blob`, `dtype`, `shape` and `offset`."""

_LEVEL = 6


class ArrayPool:
    """Many arrays, one after the other, as one text.

    The first bytes of all numbers of an array stand before all second ones, and so on: numbers of a kind have their
    high bytes in common, which compression makes nothing of. An array that is there already is not put in again.

    Args:
        name: By which the page finds the text.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._parts: list[bytes] = []
        self._size = 0
        self._offset_of: dict[tuple[str, bytes], int] = {}

    def add(self, array: NDArray[Any]) -> ArrayReference:
        """Puts in an array of 1, 2 or 4 byte unsigned integers, 4 byte integers, or 4 or 8 byte floats."""
        dtype = array.dtype.str[1:]
        bytes_of_numbers = np.frombuffer(array.astype(f"<{dtype}").tobytes(), dtype=np.uint8)
        content = bytes_of_numbers.reshape(-1, array.dtype.itemsize).T.tobytes()
        offset = self._offset_of.get((dtype, content))
        if offset is None:
            offset = self._offset_of[dtype, content] = self._size
            self._parts.append(content)
            self._size += len(content)
        return {"blob": self.name, "dtype": dtype, "shape": list(array.shape), "offset": offset}

    def encoded(self) -> str:
        """All of them: gzip in base64."""
        return compressed_text(b"".join(self._parts), _LEVEL)


def compressed_text(content: bytes, level: int = 9) -> str:
    """Gzip in base64; the same content gives the same text."""
    return base64.b64encode(gzip.compress(content, compresslevel=level, mtime=0)).decode("ascii")


def narrowest(counts: NDArray[np.int64]) -> NDArray[Any]:
    """The same numbers in the smallest unsigned type that holds all of them.

    Raises:
        ValueError: One is negative, or needs more than 32 bits.
    """
    lowest, highest = (int(counts.min()), int(counts.max())) if counts.size else (0, 0)
    if lowest < 0 or highest >= 2**32:
        raise ValueError(f"counts are from 0 to 2^32 - 1, got {lowest} to {highest}")
    return counts.astype(np.min_scalar_type(highest))

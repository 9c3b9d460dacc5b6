# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Numeric arrays of a report's page: selection of points, and lossless packing."""

import base64
import gzip
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped
from numpy.typing import NDArray

from nemo_rl_moe.runs.folder.run_data import Series
from nemo_rl_moe.runs.folder.saved_samples import evenly_spaced

ArrayReference = dict[str, Any]
"""Position of an array in the data of the page: `blob`, `dtype`, `shape` and `offset`."""

_STEPS_AT_A_TIME = 64


class ArrayPool:
    """Collects little-endian arrays that become one gzip stream in base64."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._content = bytearray()
        self._offset_of: dict[bytes, int] = {}

    def add(self, array: NDArray[Any]) -> ArrayReference:
        """Add an array of uint8, uint16, uint32, int32, float32 or float64, and return its position.

        Equal arrays are stored once, since metrics share their steps.
        """
        dtype = array.dtype.str[1:]
        content = array.astype(f"<{dtype}").tobytes()
        offset = self._offset_of.setdefault(content, len(self._content))
        if offset == len(self._content):
            self._content += content
        return {"blob": self.name, "dtype": dtype, "shape": list(array.shape), "offset": offset}

    def encoded(self) -> str:
        return compressed_text(bytes(self._content))


def compressed_text(content: bytes) -> str:
    """Return the content compressed by gzip, in base64. Without a time stamp, equal content gives equal text."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode("ascii")


def narrowest(counts: NDArray[np.int64]) -> NDArray[Any]:
    """Return counts in the smallest sufficient type of uint8, uint16 and uint32, otherwise in float64."""
    highest = int(counts.max(initial=0))
    return counts.astype(np.min_scalar_type(highest) if highest < 2**32 else np.float64)


def thinned(series: Series, most: int) -> Series:
    """Return at most `most` points: of each stretch of steps, the lowest, the highest and a NaN or infinite point (if
    any), and the last point of all.
    """
    number = len(series.steps)
    if number <= most:
        return series
    # All but the last point, in stretches of equal width. The last stretch is padded with copies of its end.
    num_stretches = max((most - 1) // 3, 1)
    width = -(-(number - 1) // num_stretches)
    positions = np.minimum(np.arange(-(-(number - 1) // width) * width), number - 2).reshape(-1, width)
    values = series.values[positions]
    is_finite = np.isfinite(values)
    lowest, highest = np.where(is_finite, values, np.inf).argmin(1), np.where(is_finite, values, -np.inf).argmax(1)
    rows, with_gap = np.arange(len(positions)), ~is_finite.all(1)
    chosen = [positions[rows, lowest], positions[rows, highest], positions[rows, (~is_finite).argmax(1)][with_gap]]
    kept = np.unique(np.concatenate([*chosen, [number - 1]]))
    return Series(series.steps[kept], series.values[kept])


def highest_of_stretches(
    values: Shaped[np.ndarray, "steps columns"], most: int
) -> tuple[Int[np.ndarray, " stretches"], Shaped[np.ndarray, "stretches columns"]]:
    """Split steps into at most `most` stretches. Return each stretch's last index and highest value per column."""
    last = evenly_spaced(len(values), most)
    first = np.concatenate([[0], last[:-1] + 1])
    return last, np.maximum.reduceat(values, first, axis=0)


def in_parts(function: Callable[..., NDArray[Any]], *of_steps: NDArray[Any]) -> NDArray[Any]:
    """Call a function on 64 steps at a time, to save gigabytes of memory. Return its results for all steps."""
    starts = range(0, len(of_steps[0]), _STEPS_AT_A_TIME)
    return np.concatenate(
        [function(*(part[start : start + _STEPS_AT_A_TIME] for part in of_steps)) for start in starts]
    )

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Long histories in few points, without losing what stands out in them."""

import numpy as np
from jaxtyping import Int, Shaped

from nemo_rl_moe.report.run_data import Series


def evenly_spaced(number: int, most: int) -> Int[np.ndarray, " chosen"]:
    """At most `most` of the positions 0 to `number` - 1, as evenly spaced as can be; the last one always."""
    chosen = min(number, max(most, 1))
    return np.ceil(np.arange(1, chosen + 1) * number / max(chosen, 1)).astype(np.int64) - 1


def thinned(series: Series, most: int) -> Series:
    """At most `most` points of a series, all of them real ones.

    Of each stretch of steps, those with the lowest and the highest value, and one that is NaN or infinite where there
    is one; and the last point. A spike of one step is kept so.
    """
    number = len(series.steps)
    if number <= most:
        return series
    # All but the last point, in stretches of equal width; what is missing of the last stretch is a copy of its end.
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
    values: Shaped[np.ndarray, "steps places"], most: int
) -> tuple[Int[np.ndarray, " stretches"], Shaped[np.ndarray, "stretches places"]]:
    """At most `most` rows: the position of each stretch's last row, and the highest value at each place."""
    last = evenly_spaced(len(values), most)
    first = np.concatenate([[0], last[:-1] + 1])
    return last, np.maximum.reduceat(values, first, axis=0)

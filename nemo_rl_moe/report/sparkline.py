# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A metric over time in one line of text."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-~=+*#"
NOT_FINITE = "!"
_LEAST_RELATIVE_SPAN = 1e-9  # below it, what differs are the last bits of means


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """At most so many characters: the lowest value has the first level, the highest the last.

    Of more values than characters, each character is the mean of those that it stands for. One that stands for a value
    that is NaN or infinite is a `!`, however many others there are.

    Args:
        values: In the order of the steps.
        width: Characters that there is room for.
        levels: From low to high.
    """
    columns = _columns(np.asarray(values, dtype=np.float64), width)
    is_finite = np.isfinite(columns)
    finite = columns[is_finite] if is_finite.any() else np.zeros(1)
    # Halves: the difference of two huge numbers may be beyond all numbers.
    lowest, half_span = finite.min(), finite.max() / 2 - finite.min() / 2
    if half_span <= _LEAST_RELATIVE_SPAN * np.abs(finite).max():
        shares = np.full(len(columns), 0.5)
    else:
        shares = (np.where(is_finite, columns, lowest) / 2 - lowest / 2) / half_span
    places = np.minimum(shares * len(levels), len(levels) - 1).astype(int)
    return "".join(
        levels[place] if is_number else NOT_FINITE
        for place, is_number in zip(places.tolist(), is_finite.tolist(), strict=True)
    )


def _columns(values: Float[np.ndarray, " steps"], width: int) -> Float[np.ndarray, " columns"]:
    number = min(len(values), max(width, 0))
    if number == 0:
        return np.zeros(0)
    edges = np.arange(number + 1) * len(values) // number
    sizes = np.diff(edges)
    with np.errstate(invalid="ignore"):
        # The sum of the parts: that of the values could be beyond all numbers.
        means: Float[np.ndarray, " columns"] = np.add.reduceat(values / np.repeat(sizes, sizes), edges[:-1])
    return means

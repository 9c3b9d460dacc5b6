# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that leave their usual level from one step to the next, such as an expert that loses all tokens.

An idle expert differs from chance only after many steps, but after a few if it has just lost a full share of tokens."""

from collections import deque
from math import isfinite
from statistics import median, stdev

import numpy as np

from nemo_rl_moe.routing.metrics.load_arrays import dead, utilization
from nemo_rl_moe.shapes import Bool, Int

WINDOW = 20
"""Number of last steps from whose values the usual level of a metric is computed."""
LEAST_VALUES = 5
"""Least number of values from which a level is computed."""
SIGMAS = 6.0


class RunningLevel:
    """Usual level of a metric: median and spread of its last values, without values that were far from them.

    If values are far from the level for more than `WINDOW` steps, they become the new level.
    """

    def __init__(self, least: float):
        self._least = least
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._outside = 0

    @property
    def median(self) -> float:
        """Median of the last values at the usual level, NaN while there are too few."""
        return median(self._values) if len(self._values) >= LEAST_VALUES else float("nan")

    def leaves(self, value: float, *, upwards: bool) -> bool:
        """Add a value. Return True if it is far above the median (far below, if not `upwards`).

        A value is far from the median if their distance exceeds six spreads and the metric's least distance. The spread
        is the standard deviation of the level's n values times 1 + 5 / n, since it is uncertain itself. So with five
        values a change must be twelve standard deviations. Infinite values and NaN are ignored.
        """
        if not isfinite(value):
            return False
        if len(self._values) >= LEAST_VALUES:
            spread = stdev(self._values) * (1 + LEAST_VALUES / len(self._values))
            distance = (value - self.median) * (1 if upwards else -1)
            if distance > max(self._least, SIGMAS * spread):
                self._outside += 1
                if self._outside > WINDOW:
                    self._values.clear()
                    self._values.append(value)
                return True
        self._outside = 0
        self._values.append(value)
        return False


LEAST_SHARE = 0.5
"""Least earlier load of an expert, relative to a fair share. With less, it may get no token at some steps by chance."""


class SuddenlyIdle:
    """Finds experts that have no token now, but had at least half of a fair share before."""

    def __init__(self, shape: tuple[int, ...]):
        self._earlier: deque[np.ndarray] = deque(maxlen=WINDOW)
        self.steps = np.zeros(shape, dtype=np.int64)
        """Number of successive steps in which each expert has had no token, after at least half of a fair share."""

    def observe(self, counts: Int[np.ndarray, "layers experts"]) -> None:
        """Add the next step. The earlier load is a median over steps, which a few idle steps do not change."""
        used = np.zeros(counts.shape, dtype=bool)
        if len(self._earlier) >= LEAST_VALUES:
            used = np.median(np.stack(self._earlier), 0) >= LEAST_SHARE
        self.steps = np.where(dead(counts) & used, self.steps + 1, 0)
        self._earlier.append(utilization(counts))

    def for_steps(self, num_steps: int | None) -> Bool[np.ndarray, "layers experts"]:
        """Return a mask of experts that have been suddenly idle for at least `num_steps` steps. None: no expert."""
        chosen: Bool[np.ndarray, "layers experts"] = self.steps >= (np.inf if num_steps is None else max(num_steps, 1))
        return chosen

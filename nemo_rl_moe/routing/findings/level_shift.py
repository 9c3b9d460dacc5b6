# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that leave their usual level from one step to the next, such as an expert that loses all tokens.

Distinguishing an idle expert from chance takes many steps, but few if it suddenly loses its full share."""

from collections import deque
from math import isfinite
from statistics import median, stdev

import numpy as np

from nemo_rl_moe.routing.metrics.load_arrays import dead, utilization
from nemo_rl_moe.shapes import Bool, Int

WINDOW = 20
"""Number of steps whose values make the level."""
LEAST_VALUES = 5
"""Least number of values for a level."""
SIGMAS = 6.0


class RunningLevel:
    """Level of a metric: median and spread of its last values, without values that have left the level.

    A value that stays outside for longer than the window becomes the new level.
    """

    def __init__(self, least: float):
        self._least = least
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._outside = 0

    @property
    def median(self) -> float:
        """Median of the level, NaN before there is one."""
        return median(self._values) if len(self._values) >= LEAST_VALUES else float("nan")

    def leaves(self, value: float, *, upwards: bool) -> bool:
        """Return True for a finite value beyond the median, in one direction, by six spreads and the least distance.

        The spread is the standard deviation of the level's n values times 1 + 5 / n, since the deviation is uncertain
        itself. With five values a change must be twelve standard deviations.
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
"""Least earlier utilization of an expert, relative to a fair share. With less, it may miss some steps by chance."""


class SuddenlyIdle:
    """Finds experts that have no token now, but had at least half of a fair share before."""

    def __init__(self, shape: tuple[int, ...]):
        self._earlier: deque[np.ndarray] = deque(maxlen=WINDOW)
        self.steps = np.zeros(shape, dtype=np.int64)
        """Number of successive steps in this condition."""

    def observe(self, counts: Int[np.ndarray, "layers experts"]) -> None:
        """Add the next step. The earlier share is the median, which the first idle steps do not change."""
        used = np.zeros(counts.shape, dtype=bool)
        if len(self._earlier) >= LEAST_VALUES:
            used = np.median(np.stack(self._earlier), 0) >= LEAST_SHARE
        self.steps = np.where(dead(counts) & used, self.steps + 1, 0)
        self._earlier.append(utilization(counts))

    def for_steps(self, num_steps: int | None) -> Bool[np.ndarray, "layers experts"]:
        """Return the experts in this condition for at least `num_steps` steps. No expert if `num_steps` is None."""
        chosen: Bool[np.ndarray, "layers experts"] = self.steps >= (np.inf if num_steps is None else max(num_steps, 1))
        return chosen

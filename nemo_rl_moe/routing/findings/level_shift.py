# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that leave their own level from one step to the next: a loss of all tokens, a rise of the overload.

It takes patience to distinguish a long idle expert from chance, and none for one that loses a whole share at once."""

from collections import deque
from math import isfinite
from statistics import median, stdev

import numpy as np

from nemo_rl_moe.routing.metrics.load_arrays import dead, utilization
from nemo_rl_moe.shapes import Bool, Int

WINDOW = 20
"""Steps whose values make the level."""
LEAST_VALUES = 5
"""Values without which there is no level yet."""
SIGMAS = 6.0


class RunningLevel:
    """Median of the last values and their own spread; what has left the level is not part of it.

    A value that stays outside for longer than the window is the new level.
    """

    def __init__(self, least: float):
        self._least = least
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._outside = 0

    @property
    def median(self) -> float:
        """Median of the level; NaN before there is one."""
        return median(self._values) if len(self._values) >= LEAST_VALUES else float("nan")

    def leaves(self, value: float, *, upwards: bool) -> bool:
        """Return True for a value beyond the median by six spreads and by the least distance, in one direction. Values
        that are not finite leave nothing and are part of no level.

        The spread is the standard deviation of the level, more by a factor of 1 + 5 / n for its n values: it is
        uncertain itself. With five values a drop must be twelve of them.
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
"""Utilization that an expert had before; one that had less may miss a step or two."""


class SuddenlyIdle:
    """Experts without any token that had at least half of a fair share before."""

    def __init__(self, shape: tuple[int, ...]):
        self._earlier: deque[np.ndarray] = deque(maxlen=WINDOW)
        self.steps = np.zeros(shape, dtype=np.int64)
        """Steps in a row that each has been so."""

    def observe(self, counts: Int[np.ndarray, "layers experts"]) -> None:
        """Take the next step. The share before is the median, which the first idle steps do not move."""
        used = np.zeros(counts.shape, dtype=bool)
        if len(self._earlier) >= LEAST_VALUES:
            used = np.median(np.stack(self._earlier), 0) >= LEAST_SHARE
        self.steps = np.where(dead(counts) & used, self.steps + 1, 0)
        self._earlier.append(utilization(counts))

    def for_steps(self, num_steps: int | None) -> Bool[np.ndarray, "layers experts"]:
        """Return the experts that have been so for at least `num_steps` steps; none where that is None."""
        chosen: Bool[np.ndarray, "layers experts"] = self.steps >= (np.inf if num_steps is None else max(num_steps, 1))
        return chosen

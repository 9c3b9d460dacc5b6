# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The running level of a number that is measured at every step, and values that leave it."""

from collections import deque
from statistics import median, stdev

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
        """Return True for a value beyond the median by six spreads and by the least distance, in one direction.

        The spread is the standard deviation of the level, more by a factor of 1 + 5 / n for its n values: it is
        uncertain itself. With five values a drop must be twelve of them.
        """
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

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads that change from one step to the next: an expert that loses all of its tokens.

It takes patience to report a long idle expert from chance, and none for one that loses a whole share at once.
"""

from collections import deque

import numpy as np

from nemo_rl_moe.routing.findings.running_level import LEAST_VALUES, WINDOW
from nemo_rl_moe.routing.metrics.load_arrays import dead, utilization
from nemo_rl_moe.shapes import Bool, Int

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

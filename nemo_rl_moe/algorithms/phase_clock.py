# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How long the phases of a step take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_rl_moe.algorithms.step_metrics import timing_metrics


class PhaseClock:
    """Adds up the seconds and the tokens of each phase; a phase may come several times.

    Args:
        clock: Seconds on a clock that only goes forward.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside counts for this phase."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def count_tokens(self, name: str, num_tokens: int) -> None:
        """Tokens that a phase worked on, for its tokens a second."""
        self._tokens[name] = self._tokens.get(name, 0) + num_tokens

    def metrics(self) -> dict[str, float]:
        """`timing/{phase}/seconds`, and `timing/{phase}/tokens_per_second` where tokens were counted."""
        metrics: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            metrics |= timing_metrics(name, seconds, self._tokens.get(name, 0))
        return metrics

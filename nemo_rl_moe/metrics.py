# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics with their reduction, and the seconds and tokens of a step's phases."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """How a metric's values, one per microbatch or rank, are reduced to one number."""

    SUM = "sum"
    SHARE = "share"
    """Values are added, because each is already divided by the number of trained tokens of the global batch: the sum is
    the mean over these tokens. For several global batches, it is the mean over all their tokens."""
    SEQUENCE_SHARE = "sequence_share"
    """Like `SHARE`, but each value is divided by the number of sequences with trained tokens, or by a fixed number,
    such as that of pairs."""
    PART = "part"
    """Values are added, but the sum is not logged. Other metrics are computed from it, such as a ratio of two sums."""
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class MetricSeries:
    """Values of one metric, one per microbatch or rank, and how they are reduced."""

    values: tuple[float, ...]
    reduction: Reduction

    def reduce(self) -> float:
        """Return the values reduced to one number. NaN without values."""
        if not self.values:
            return math.nan
        if self.reduction is Reduction.MIN:
            return min(self.values)
        return max(self.values) if self.reduction is Reduction.MAX else math.fsum(self.values)


def concatenate(series: Iterable[MetricSeries]) -> MetricSeries:
    """Return one series with the values of the same metric from several ranks."""
    parts = list(series)
    reductions = {part.reduction for part in parts}
    if len(reductions) != 1:
        raise ValueError(f"one metric needs one reduction, got {sorted(r.value for r in reductions)}")
    return MetricSeries(tuple(value for part in parts for value in part.values), reductions.pop())


def timing_metrics(phase: str, seconds: float, num_tokens: int = 0) -> dict[str, float]:
    """Return `timing/{phase}/seconds` and, if tokens were counted, `timing/{phase}/tokens_per_second`."""
    metrics = {"seconds": seconds}
    if num_tokens:
        metrics["tokens_per_second"] = num_tokens / seconds
    return with_prefix(f"timing/{phase}", metrics)


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


class PhaseClock:
    """Adds up the seconds and tokens of phases. A phase may occur several times.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of this context's body to the phase `name`."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def count_tokens(self, name: str, num_tokens: int) -> None:
        """Add to the number of tokens of a phase, from which its tokens per second are computed."""
        self._tokens[name] = self._tokens.get(name, 0) + num_tokens

    def seconds(self, name: str) -> float:
        """Return the seconds that have been added to a phase so far."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return `timing/{phase}/seconds`, and `timing/{phase}/tokens_per_second` if tokens were counted."""
        metrics: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            metrics |= timing_metrics(name, seconds, self._tokens.get(name, 0))
        return metrics

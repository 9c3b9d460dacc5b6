# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics with a reduction, and the seconds and tokens of a step's phases."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """Reduction of a metric's values, one per microbatch or rank, to one number."""

    SUM = "sum"
    SHARE = "share"
    """Values are shares that add up to a mean over the trained tokens of a global batch. For several global batches,
    the result is the mean over all their tokens."""
    SEQUENCE_SHARE = "sequence_share"
    """Like `SHARE` for a mean over the sequences with trained tokens, or over a fixed number of them, such as pairs."""
    PART = "part"
    """Sums from which metrics are computed, such as a numerator and a divisor, and which are not logged."""
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class MetricSeries:
    """Values of one metric, one per microbatch or rank, and their reduction."""

    values: tuple[float, ...]
    reduction: Reduction

    def reduce(self) -> float:
        """Reduce the values to one number. NaN without values."""
        if not self.values:
            return math.nan
        if self.reduction is Reduction.MIN:
            return min(self.values)
        return max(self.values) if self.reduction is Reduction.MAX else math.fsum(self.values)


def concatenate(series: Iterable[MetricSeries]) -> MetricSeries:
    """Concatenate the values of one metric from several ranks."""
    parts = list(series)
    reductions = {part.reduction for part in parts}
    if len(reductions) != 1:
        raise ValueError(f"one metric needs one reduction, got {sorted(r.value for r in reductions)}")
    return MetricSeries(tuple(value for part in parts for value in part.values), reductions.pop())


def timing_metrics(phase: str, seconds: float, num_tokens: int = 0) -> dict[str, float]:
    """Return the seconds of a phase, and its tokens per second if it has tokens, as `timing/{phase}/...` keys."""
    metrics = {"seconds": seconds}
    if num_tokens:
        metrics["tokens_per_second"] = num_tokens / seconds
    return with_prefix(f"timing/{phase}", metrics)


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


class PhaseClock:
    """Sums of the seconds and tokens of phases, which may occur several times.

    Args:
        clock: Monotonic clock, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to this phase."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started

    def count_tokens(self, name: str, num_tokens: int) -> None:
        """Add tokens of a phase, for its tokens per second."""
        self._tokens[name] = self._tokens.get(name, 0) + num_tokens

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase so far."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return `timing/{phase}/seconds`, and `timing/{phase}/tokens_per_second` if tokens were counted."""
        metrics: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            metrics |= timing_metrics(name, seconds, self._tokens.get(name, 0))
        return metrics

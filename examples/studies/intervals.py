# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Means with 95% intervals over seeds, and paired differences of two methods."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEWEST = 2
"""Smallest number of values with an interval."""
FEWEST_FOR_A_CLAIM = 12
"""Smallest number of paired seeds with a claim. With fewer, the difference is only shown."""


@dataclass(frozen=True)
class Interval:
    """Mean of `count` values with its interval."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def holds_zero(self) -> bool:
        return self.low <= 0 <= self.high


def student_share(t: float, freedom: int) -> float:
    """Return the probability that Student's t lies between `-t` and `t` (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Args:
        t: At least 0.
        freedom: Degrees of freedom, at least 1.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for power in range(1 if is_odd else 0, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return the bound `t` with the probability `confidence` between `-t` and `t`, by bisection."""
    low, high = 0.0, 1.0
    while student_share(high, freedom) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_share(middle, freedom) < confidence else (low, middle)
    return high


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean and its 95% interval by Student's t. None for fewer than two values.

    Raises:
        ValueError: A value is not finite.
    """
    if any(not math.isfinite(value) for value in values):
        raise ValueError(f"values that are not finite: {list(values)}")
    count = len(values)
    if count < FEWEST:
        return None
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    reach = student_quantile(count - 1) * math.sqrt(variance / count)
    return Interval(mean, mean - reach, mean + reach, count)


def paired_differences(method: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Return method minus baseline for each common seed, seeds ascending."""
    return [method[seed] - baseline[seed] for seed in sorted(method.keys() & baseline.keys())]


def geometric(values: Sequence[float]) -> Interval | None:
    """Return the geometric mean and its interval, by the mean of logarithms, for values that span powers of ten.

    None for fewer than two values, or if one is not above 0.
    """
    if any(value <= 0 for value in values):
        return None
    found = interval([math.log(value) for value in values])
    return found and Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.count)


def paired_factors(method: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Return method over baseline for each common seed whose baseline is not 0, seeds ascending."""
    return [method[seed] / baseline[seed] for seed in sorted(method.keys() & baseline.keys()) if baseline[seed]]


def shown(found: Interval | None, digits: str) -> str:
    """Format a mean with its interval and number of values, in a format such as `.3f`. None is a dash."""
    if found is None:
        return "-"
    return f"{found.mean:{digits}} ({found.low:{digits}} to {found.high:{digits}}), n {found.count}"

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A metric carries its own reduction, so that no name ever decides how a number is combined."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    """How the values of one metric, one a microbatch or rank, become one number."""

    SUM = "sum"
    SHARE = "share"
    """Shares of a mean over a global batch: they add up to it. Of several global batches, the mean of theirs."""
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True)
class MetricSeries:
    """The values of one metric, in the order in which they arose, and how to reduce them.

    Attributes:
        values: One float for each microbatch (or rank).
        reduction: What `reduce` does with them.
    """

    values: tuple[float, ...]
    reduction: Reduction

    def reduce(self) -> float:
        """The one number that the values stand for; NaN when there is none."""
        if not self.values:
            return math.nan
        if self.reduction in (Reduction.SUM, Reduction.SHARE):
            return math.fsum(self.values)
        if self.reduction is Reduction.MEAN:
            return math.fsum(self.values) / len(self.values)
        return min(self.values) if self.reduction is Reduction.MIN else max(self.values)


def concatenate(series: Iterable[MetricSeries]) -> MetricSeries:
    """Joins the values that several ranks hold of one metric.

    Raises:
        ValueError: The ranks disagree about the reduction, or there is none.
    """
    parts = list(series)
    reductions = {part.reduction for part in parts}
    if len(reductions) != 1:
        raise ValueError(f"one metric needs one reduction, got {sorted(r.value for r in reductions)}")
    return MetricSeries(tuple(value for part in parts for value in part.values), reductions.pop())

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step by the lag of its tokens: mismatch, clipping and effective sample size.

Tokens without lag show the mismatch of engine and trainer. The additional mismatch of older tokens is staleness. The
two divergences add up if the difference of engine and trainer does not depend on how the weights have moved.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan

import numpy as np

from nemo_rl_moe.algorithms.losses.lag_sums import LagSum, sum_key
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.metrics import MetricSeries, PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.routing.agreement.lag_agreement import live_agreement_key
from nemo_rl_moe.runs.folder.artifacts import BY_LAG
from nemo_rl_moe.runs.folder.by_lag import LagTable
from nemo_rl_moe.shapes import Float
from nemo_rl_moe.token_lag import LAG_CLASSES

PerClass = Float[np.ndarray, " classes"]


@dataclass(frozen=True)
class LagSums:
    """Float64 sums over the trained tokens of a step, for each class of lag (optimizer steps since sampling)."""

    of: Mapping[LagSum, PerClass]

    @classmethod
    def from_series(cls, series: Mapping[str, MetricSeries]) -> "LagSums | None":
        """Return the loss's sums over all microbatches and ranks. None if the step has no lags."""
        if sum_key(LAG_CLASSES[0], LagSum.TOKENS) not in series:
            return None
        return cls({each: np.array([series[sum_key(name, each)].reduce() for name in LAG_CLASSES]) for each in LagSum})

    @property
    def total(self) -> "LagSums":
        """Sums over the tokens of all classes together. Each array has one element."""
        return LagSums({each: values.sum(keepdims=True) for each, values in self.of.items()})

    def mean(self, quantity: LagSum) -> PerClass:
        """Return the mean over the tokens of each class, NaN for a class without tokens."""
        tokens = self.of[LagSum.TOKENS]
        return self.of[quantity] / np.where(tokens > 0, tokens, nan)

    @property
    def effective_samples(self) -> PerClass:
        """`(sum w)^2 / (n sum w^2)` for the `n` importance ratios `w` of each class. 1 if all ratios are equal."""
        return self.mean(LagSum.WEIGHT) ** 2 / self.mean(LagSum.SQUARED_WEIGHT)


def staleness_part(divergence: PerClass, of_engines: float) -> PerClass:
    """Return the divergence of each class of lag minus the divergence of engine and trainer at lag 0.

    The result is NaN for the class without lag.

    Args:
        divergence: Mean estimate of the divergence in each class.
        of_engines: Mean estimate for tokens without lag, in this step or an earlier one. NaN without such tokens.
    """
    part = divergence - of_engines
    part[0] = nan
    return part


def lag_table(sums: LagSums, of_engines: float, live_agreement: PerClass) -> LagTable:
    """Return the statistics of each class of lag (optimizer steps since a token was sampled).

    - `num_valid_tokens`
    - `sampling_logp_difference`, `gen_kl_error`, `clip_fraction` (both bounds): like the metrics of the loss with these
      names
    - `kl_staleness`: `staleness_part` of `gen_kl_error`
    - `effective_samples`: relative effective sample size, from 0 to 1, of the importance ratios before any correction
    - `live_agreement`: share of the rollout's rows (experts of a token in a layer) that the routers would also choose,
      NaN without a capture
    """
    divergence = sums.mean(LagSum.DIVERGENCE)
    return LagTable(
        {
            "num_valid_tokens": sums.of[LagSum.TOKENS],
            "sampling_logp_difference": sums.mean(LagSum.DIFFERENCE),
            "gen_kl_error": divergence,
            "kl_staleness": staleness_part(divergence, of_engines),
            "clip_fraction": sums.mean(LagSum.CLIPPED),
            "effective_samples": sums.effective_samples,
            "live_agreement": live_agreement,
        }
    )


def metrics_of_table(table: LagTable) -> dict[str, float]:
    """Return `by_lag/{class}/{name}` for classes with tokens. `live_agreement` is omitted: it is a routing metric."""
    return {
        f"by_lag/{lag_class}/{name}": float(values[number])
        for number, lag_class in enumerate(LAG_CLASSES)
        for name, values in table.of.items()
        if name != "live_agreement" and table.of["num_valid_tokens"][number] and not np.isnan(values[number])
    }


def metrics_of_all(sums: LagSums) -> dict[str, float]:
    """Return `by_lag/mean_lag` and `by_lag/effective_samples` over all tokens. Empty without tokens."""
    if not sums.of[LagSum.TOKENS].any():
        return {}
    total = sums.total
    return {
        "by_lag/mean_lag": float(total.mean(LagSum.LAG)[0]),
        "by_lag/effective_samples": float(total.effective_samples[0]),
    }


class LagMetrics(RunObserver):
    """Observer that reports metrics and a table for each step with tokens that older weights sampled.

    Args:
        record_artifact: Function that receives name and content of the step's table.
    """

    def __init__(self, record_artifact: Callable[[str, LagTable], None]):
        self._record_artifact = record_artifact
        self._of_engines = nan

    def after_update(self, result: TrainResult, clock: PhaseClock) -> dict[str, float]:
        series = result.microbatch_metrics
        sums = LagSums.from_series(series)
        if sums is None:  # the trained weights sampled all tokens
            if "gen_kl_error" in series and series["gen_kl_error"].values:
                self._of_engines = series["gen_kl_error"].reduce()
            return {}
        if sums.of[LagSum.TOKENS][0]:
            self._of_engines = float(sums.mean(LagSum.DIVERGENCE)[0])
        agreement = [result.moe_metrics.get(live_agreement_key(name), nan) for name in LAG_CLASSES]
        table = lag_table(sums, self._of_engines, np.array(agreement))
        self._record_artifact(BY_LAG.name, table)
        return metrics_of_table(table) | metrics_of_all(sums)

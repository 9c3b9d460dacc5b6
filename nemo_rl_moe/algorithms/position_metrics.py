# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mismatch of generation and training by the position of tokens in their sequences."""

from nemo_rl_moe.algorithms.losses.position_sums import QUARTERS, PositionSum, sum_key
from nemo_rl_moe.algorithms.run_observers import RunObserver
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult


class PositionMetrics(RunObserver):
    """Observer that reports `by_position/{quarter}/sampling_logp_difference` of each step, for quarters with tokens."""

    def after_update(self, result: TrainResult, clock: PhaseClock) -> dict[str, float]:
        series = result.microbatch_metrics
        metrics = {}
        for name in QUARTERS:
            tokens, difference = (series.get(sum_key(name, each)) for each in PositionSum)
            if tokens is not None and difference is not None and tokens.reduce():
                metrics[f"by_position/{name}/sampling_logp_difference"] = difference.reduce() / tokens.reduce()
        return metrics

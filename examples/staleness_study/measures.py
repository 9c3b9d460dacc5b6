# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures of a run of the staleness study, from its metrics."""

import statistics

from examples.staleness_study.grid import Run
from examples.studies.results import Measures, Result

MEASURES: Measures = {
    "accuracy": ("val/accuracy", lambda values: values[-1]),
    "staleness": ("train/staleness/mean", lambda values: values[-1]),
    "reward": ("train/reward", statistics.fmean),
    "mismatch": ("train/gen_kl_error", statistics.median),
    "mismatch, routing": ("train/moe/routing_split/kl_routing", statistics.median),
    # With the rollout's experts. With the trainer's engine, the rest is staleness of the weights.
    "mismatch, other than routing": ("train/moe/routing_split/kl_numerics", statistics.median),
    "routing drift": ("train/moe/routing_drift/rows_differing_of_step", statistics.fmean),
    "live agreement": ("train/moe/routing/live_agreement", statistics.fmean),
    "live agreement, last step": ("train/moe/routing/live_agreement", lambda values: values[-1]),
    "effective samples": ("train/by_lag/effective_samples", statistics.fmean),
    "clipped below": ("train/clip_fraction_low", statistics.fmean),
    "clipped above": ("train/clip_fraction_high", statistics.fmean),
    "gradient norm": ("train/grad_norm", statistics.median),
    "entropy, last step": ("train/approx_entropy", lambda values: values[-1]),
}
"""Name to the metric, and to the reduction of its values over the steps."""

Results = dict[Run, Result]

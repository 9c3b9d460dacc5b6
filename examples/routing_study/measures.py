# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures of a run of the routing study, from its metrics."""

import statistics

from examples.routing_study.grid import Run
from examples.studies.results import Measures, Result

MEASURES: Measures = {
    "accuracy at start": ("val/accuracy", lambda values: values[0]),
    "accuracy": ("val/accuracy", lambda values: values[-1]),
    "reward": ("train/reward", statistics.fmean),
    "mismatch, median step": ("train/gen_kl_error", statistics.median),
    "mismatch, worst step": ("train/gen_kl_error", max),
    "probability error": ("train/token_mult_prob_error", statistics.fmean),
    "probability error, worst step": ("train/token_mult_prob_error", max),
    "live agreement": ("train/moe/routing/live_agreement", statistics.fmean),
    "live agreement, first step": ("train/moe/routing/live_agreement", lambda values: values[0]),
    "agreement": ("train/moe/routing/agreement", statistics.fmean),
    "clipped below": ("train/clip_fraction_low", statistics.fmean),
    "clipped above": ("train/clip_fraction_high", statistics.fmean),
    "largest ratio": ("train/probs_ratio_max", max),
    "corrected, truncated": ("train/importance_weight_truncated_fraction", statistics.fmean),
    "corrected, dropped": ("train/importance_weight_dropped_fraction", statistics.fmean),
    "entropy, last step": ("train/approx_entropy", lambda values: values[-1]),
    "skipped updates": ("train/skipped_updates", sum),
}
"""Name to the metric, and to the reduction of its values over the steps."""

Results = dict[Run, Result]

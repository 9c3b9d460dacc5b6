# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures of a run of the study of adapters, from its metrics."""

import statistics

from examples.lora_study.grid import Run
from examples.studies.results import Measures, Result

MEASURES: Measures = {
    "accuracy": ("val/accuracy", lambda values: values[-1]),
    "reward": ("train/reward", statistics.fmean),
    "mismatch": ("train/gen_kl_error", statistics.median),
    "agreement of the routers with the rollout": ("train/moe/routing/live_agreement", statistics.fmean),
    "divergence from the base, last step": ("train/kl_penalty", lambda values: values[-1]),
    "routing drift of a step": ("train/moe/routing_drift/rows_differing_of_step", statistics.fmean),
    "routing drift from the base, last step": (
        "train/moe/routing_drift/rows_differing_from_reference",
        lambda values: values[-1],
    ),
    "gradient norm": ("train/grad_norm", statistics.median),
    "entropy, last step": ("train/approx_entropy", lambda values: values[-1]),
}
"""Name to the metric, and to the reduction of its values over the steps."""

Results = dict[Run, Result]

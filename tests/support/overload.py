# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Overload factors of counts that lie in one place, by the functions that a job calls on its ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_moe.routing.metrics.overload_factor import (
    OverloadSums,
    PredictedOverload,
    StageEvents,
    cumulative_peak_ratios,
    overload_metrics,
    overload_sums,
    predictions,
    rank_loads,
)


def summarise_overload(
    counts_DMLE: Tensor,
    expert_parallel_size: int,
    layer_indices: Sequence[int],
    stage_events: Sequence[StageEvents] = (),
    *,
    per_layer: bool = False,
) -> dict[str, float]:
    """Compute the metrics of one step."""
    loads = rank_loads(counts_DMLE, expert_parallel_size)
    peaks = [float(cumulative_peak_ratios(loads, stage).amax()) for stage in stage_events]
    sums = _sums_of_all(counts_DMLE, [expert_parallel_size], expert_parallel_size)
    return overload_metrics(sums, layer_indices, max(peaks, default=None), per_layer=per_layer)


def predict_overload(
    counts_DMLE: Tensor, expert_parallel_sizes: Sequence[int], *, recorded_expert_parallel_size: int = 1
) -> dict[int, PredictedOverload]:
    """Predict overload factors for other expert-parallel sizes."""
    sums = _sums_of_all(counts_DMLE, expert_parallel_sizes, recorded_expert_parallel_size)
    return dict(zip(expert_parallel_sizes, predictions(sums), strict=True))


def _sums_of_all(counts_DMLE: Tensor, sizes: Sequence[int], recorded_size: int) -> OverloadSums:
    _, num_microbatches, num_layers, _ = counts_DMLE.shape
    places = torch.arange(num_microbatches * num_layers)
    return overload_sums(counts_DMLE.flatten(1, 2), places, (num_microbatches, num_layers), sizes, recorded_size)

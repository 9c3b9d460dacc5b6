# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Overload factor: the work of the busiest expert-parallel rank over the mean rank's.

All functions are pure. Axes, as in `counts_DMLE`: D expert-data-parallel slices (groups of ranks that exchange tokens
among themselves), M microbatches, L MoE layers of all pipeline stages, E experts, R expert-parallel ranks. Rank r of a
slice holds the experts `r*E/R .. (r+1)*E/R - 1`. Ranks that share experts by expert-tensor parallelism do the same work
and count as one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_moe.routing.metrics.metric_keys import WHAT_IF_PREFIX
from nemo_rl_moe.shapes import Float, Int, Num


@dataclass(frozen=True)
class StageEvents:
    """Forward and backward passes of one pipeline stage in a step, the same on all of its ranks.

    Attributes:
        events: (kind, chunk, microbatch) in the order of the schedule. Kind is 1 for a forward and -1 for a backward
            pass. Chunk is the index of the virtual stage.
    """

    events: Sequence[tuple[int, int, int]]
    chunk_layers: Sequence[Sequence[int]]


class PredictedOverload(NamedTuple):
    average: float
    maximum: float


def check_split(num_experts: int, expert_parallel_size: int) -> None:
    """Raise a ValueError if the expert-parallel size does not divide the number of experts."""
    if expert_parallel_size < 1 or num_experts % expert_parallel_size:
        raise ValueError(f"{num_experts} experts cannot be split evenly over {expert_parallel_size} ranks")


def rank_loads(
    counts_DMLE: Num[Tensor, "slices *events experts"], expert_parallel_size: int
) -> Num[Tensor, "slices *events ranks"]:
    """Return the number of assignments that each expert-parallel rank computes: the sum over its block of experts.

    A slice is a group of ranks that exchange tokens among themselves.
    """
    num_experts = counts_DMLE.shape[-1]
    check_split(num_experts, expert_parallel_size)
    return counts_DMLE.unflatten(-1, (expert_parallel_size, num_experts // expert_parallel_size)).sum(-1)


def overload_factors(
    loads_DMLR: Num[Tensor, "slices *events ranks"], *, of_nothing: float = 1.0
) -> Float[Tensor, " slices *events"]:
    """Return the highest load of a rank over the mean load, for each slice (ranks that exchange tokens) and event.

    The factor is `of_nothing` without tokens. Counts are integers, so balanced loads and a single rank give exactly 1,
    and all tokens on one of R ranks give exactly R.
    """
    loads = loads_DMLR.to(torch.float64)
    total = loads.sum(-1)
    # The equal max / (total / R) would round twice.
    return (loads.amax(-1) * loads.shape[-1] / total).where(total > 0, of_nothing)


def cumulative_peak_ratios(
    loads_DMLR: Num[Tensor, "slices microbatches layers ranks"], stage: StageEvents
) -> Float[Tensor, "slices ranks"]:
    """Return how much larger a rank's peak of held assignments is than with balanced loads. 1 without tokens.

    A rank holds the assignments of a microbatch from its forward to its backward pass. The peak of this running sum is
    divided by the peak of the mean over ranks.
    """
    slices, _, _, ranks = loads_DMLR.shape
    device = loads_DMLR.device
    if not stage.events:
        return torch.ones(slices, ranks, dtype=torch.float64, device=device)
    # Most steps have the same schedule, so the tensor comes from the cache.
    kinds, chunks, microbatches = numbers_on(device, tuple(map(tuple, stage.events))).unbind(1)
    loads_CDMR = torch.stack(
        [loads_DMLR.index_select(2, numbers_on(device, tuple(layers))).sum(2) for layers in stage.chunk_layers]
    )
    # Sums of integers below 2^53 are exact in float64.
    changes_NDR = loads_CDMR[chunks, :, microbatches].to(torch.float64) * kinds[:, None, None]
    held_NDR = changes_NDR.cumsum(0)
    peak_DR = held_NDR.amax(0).clamp(min=0)
    total_peak_D1 = held_NDR.sum(-1).amax(0)[:, None]
    return (peak_DR * ranks / total_peak_D1).where(total_peak_D1 > 0, 1.0)


@lru_cache(maxsize=64)
def numbers_on(device: torch.device, numbers: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> Int[Tensor, "*shape"]:
    """Return numbers as a cached tensor on a device. The caller must not modify it."""
    with torch.inference_mode(False):  # a later caller may need it for a backward pass
        return torch.tensor(numbers, dtype=torch.long, device=device)


def assignments_over_capacity(
    loads_DNR: Num[Tensor, "slices events ranks"], capacity_factor: float
) -> Int[Tensor, " 2"]:
    """Return the number of assignments that exceed the capacity of their rank, and the number of all assignments.

    An event is a layer in a microbatch of a slice (ranks that exchange tokens). The capacity of each of its ranks is
    `floor(capacity_factor * mean load)`, the budget of `moe_expert_rank_capacity_factor` without padding.
    """
    total = loads_DNR.sum(-1, keepdim=True)
    capacity = (capacity_factor * total.double() / loads_DNR.shape[-1]).floor()
    return torch.stack([(loads_DNR - capacity).clamp(min=0).sum().long(), total.sum().long()])


@dataclass(frozen=True)
class OverloadSums:
    """Sums of overload factors over some events, for each expert-parallel size and layer.

    An event is a layer in a microbatch of a slice (ranks that exchange tokens). If the events are split over ranks, the
    sums of `factors` and `routed` and the maxima of `maxima` over these ranks are the values of all events.
    """

    factors: Float[Tensor, "sizes layers"]
    routed: Float[Tensor, "sizes layers"]
    maxima: Float[Tensor, "sizes layers"]


def overload_sums(
    counts_DNE: Num[Tensor, "slices events experts"],
    places_N: Int[Tensor, " events"],
    grid: tuple[int, int],
    expert_parallel_sizes: Sequence[int],
    recorded_expert_parallel_size: int,
) -> OverloadSums:
    """Add up overload factors over some layers and microbatches of all slices, without waiting for the device.

    An expert-parallel size decides which experts share a rank. The counts answer this exactly. It also decides which
    ranks exchange their tokens. The counts answer this in part. With the recorded size R and D slices:

    - Size R: exactly the measured values.
    - A multiple of R that divides the D*R ranks of the run: exact, as consecutive slices exchange tokens.
    - Larger than D*R: all slices count as one exchange. A run with the same number of tokens per rank would be a bit
      more even.
    - Smaller than R: a slice counts as one exchange. The maximum is a lower bound. So is the average for equal groups.
    - Any other size: slices are merged until they have at least as many ranks. This is an estimate.

    Args:
        counts_DNE: Counts of the events. Instead of experts, they may have equally large blocks of experts, if each
            size divides the number of blocks.
        places_N: Distinct numbers `microbatch * layers + layer` of the events. A larger number marks an absent event,
            with counts of 0.
        grid: (number of microbatches, number of layers).
        expert_parallel_sizes: Each must divide the number of experts.
        recorded_expert_parallel_size: R, with which the slices were recorded.
    """
    num_microbatches, num_layers = grid
    rows = []
    for size in expert_parallel_sizes:
        loads = rank_loads(_merge_slices(counts_DNE, -(-size // recorded_expert_parallel_size)), size)
        # Factors are at least 1 if anything was routed.
        factors = overload_factors(loads, of_nothing=0.0)
        rows += [factors.sum(0), (factors > 0).sum(0).double(), factors.amax(0)]
    # Not added to sums of layers directly: on GPUs the order of such additions, and so their rounding, is random.
    on_grid = factors.new_zeros(len(rows), num_microbatches * num_layers + 1)
    on_grid[:, places_N.clamp(max=num_microbatches * num_layers)] = torch.stack(rows)
    shape = (len(expert_parallel_sizes), 3, num_microbatches, num_layers)
    factors, routed, highest = on_grid[:, :-1].view(shape).unbind(1)
    maxima = highest.amax(1).clamp(min=1) if num_microbatches else torch.ones_like(factors.sum(1))
    return OverloadSums(factors.sum(1), routed.sum(1), maxima)


def overload_metrics(
    sums: OverloadSums, layer_indices: Sequence[int], peak_ratio: float | None = None, *, per_layer: bool = False
) -> dict[str, float]:
    of_all, *_ = predictions(sums)
    metrics = {"avg_overload_factor": of_all.average, "max_overload_factor": of_all.maximum}
    if peak_ratio is not None:
        metrics["max_cum_overload_factor"] = peak_ratio
    if per_layer:
        of_layers = (of[0].tolist() for of in (sums.factors, sums.routed, sums.maxima))
        for index, factors, routed, maximum in zip(layer_indices, *of_layers, strict=True):
            metrics[f"avg_overload_factor_layer_{index}"] = _average(factors, routed)
            metrics[f"max_overload_factor_layer_{index}"] = maximum
    return metrics


def predictions(sums: OverloadSums) -> list[PredictedOverload]:
    """Return the mean and maximum overload factor over all layers for each size. Both are 1 without tokens."""
    by_size = zip(*torch.stack([sums.factors, sums.routed, sums.maxima]).tolist(), strict=True)
    return [PredictedOverload(_average(fsum(factors), sum(routed)), max(maxima)) for factors, routed, maxima in by_size]


def _average(factors: float, routed: float) -> float:
    return factors / routed if routed else 1.0


def what_if_metrics(predictions: Mapping[int, PredictedOverload]) -> dict[str, float]:
    """Return the predictions as `what_if/{avg,max}_overload_factor_ep_{size}`."""
    metrics = {}
    for size, predicted in predictions.items():
        metrics[f"{WHAT_IF_PREFIX}avg_overload_factor_ep_{size}"] = predicted.average
        metrics[f"{WHAT_IF_PREFIX}max_overload_factor_ep_{size}"] = predicted.maximum
    return metrics


def _merge_slices(counts_DNE: Tensor, slices_in_group: int) -> Tensor:
    if slices_in_group <= 1:
        return counts_DNE
    return torch.stack([group.sum(0) for group in counts_DNE.split(slices_in_group)])

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load statistics of one step: pure functions of the assignment counts of layers and experts, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from typing_extensions import NotRequired  # noqa: UP035  (Python 3.10 lacks it)

from nemo_rl_moe.routing.metrics.load_arrays import (
    deviation_of_utilization,
    excess_coefficient_of_variation,
    null_variance,
    utilization,
)
from nemo_rl_moe.shapes import Float, Int, Num


@dataclass(frozen=True)
class ExpertLoad:
    """Load matrix of a step: assignments of each expert in one `train` call, over all ranks and microbatches.

    Attributes:
        counts: On the host. Each real token counts `k` times.
        image_counts: Counts of image tokens alone, for a model with vision.
        topk: Number of experts of each token, `k`, if it is known.
    """

    layers: tuple[int, ...]
    counts: Int[Tensor, "layers experts"]
    image_counts: Int[Tensor, "layers experts"] | None = None
    topk: int | None = None


class LayerLoad(TypedDict):
    """Load of one MoE layer, for models whose layers differ in their number of experts.

    Attributes:
        expert_load: `[E]`, assignments of each expert.
        aux_loss: Load balancing loss of the layer before multiplication with its coefficient, a scalar, or None.
        n_experts: Number of experts, E.
        topk: Number of experts of each token, needed for `cv_null_mean` and `cv_excess_mean`.
    """

    expert_load: Tensor
    aux_loss: Tensor | None
    n_experts: int
    topk: NotRequired[int | None]


_MAX_BUCKETS = 4096
_MOST_SORTED = 1024
"""Largest number of values that are all sorted. With more values, buckets are faster."""


def positions_at_ranks(values: Float[Tensor, " n"], ranks: Sequence[int]) -> Int[Tensor, " ranks"]:
    """Return the positions of the values that have some ranks in ascending order.

    The position for a rank is `sorted(range(n), key=lambda i: (values[i], i))[rank]`.

    Equal values are ordered by position, so that every run picks the same ones.
    """
    wanted_ranks = torch.tensor(ranks, dtype=torch.long)
    if len(values) <= _MOST_SORTED:
        return values.argsort(stable=True)[wanted_ranks]
    low, high = torch.stack(torch.aminmax(values)).tolist()
    if low == high:
        return wanted_ranks
    num_buckets = min(len(values), _MAX_BUCKETS)
    # Subtraction and scaling round monotonically, so bucket numbers never decrease with the value.
    bucket_of_value = ((values - low) * ((num_buckets - 1) / (high - low))).to(torch.int32)
    size_of_bucket = torch.bincount(bucket_of_value, minlength=num_buckets)
    bucket_of_rank = torch.searchsorted(size_of_bucket.cumsum(0), wanted_ranks, right=True)
    is_wanted = torch.zeros(num_buckets, dtype=torch.bool)
    is_wanted[bucket_of_rank] = True
    candidates = is_wanted.index_select(0, bucket_of_value).nonzero()[:, 0]
    candidates = candidates[values[candidates].argsort(stable=True)]
    # A rank among the candidates does not count the values in earlier unwanted buckets.
    skipped = size_of_bucket.masked_fill(is_wanted, 0).cumsum(0)
    return candidates[wanted_ranks - skipped[bucket_of_rank]]


_SMALLEST = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class LayerStatistics:
    """Load statistics of each layer, in float64 on the host.

    In a layer without tokens, the dead fraction is 1 and everything else is 0. In a layer with one expert, cv is 0 and
    diversity is 1.

    Attributes:
        utilization: Load over fair share, `E * c / sum c`: 1 is fair, 0 is dead. First for the experts of the first
            layer, then of the second, and so on.
        cv: Sample standard deviation (ddof 1) of the loads over their mean.
        cv_null: Root mean square of cv under random routing of the same tokens. None if the top-k is unknown.
        expert_diversity: `exp(entropy) / E`: 1 for uniform loads, 1/E for one expert, 0 for no load.
    """

    num_experts: list[int]
    utilization: Float[Tensor, " all_experts"]
    utilization_mean: list[float]
    cv: list[float]
    cv_null: list[float] | None
    cv_excess: list[float] | None
    max_violation: list[float]
    dead_expert_frac: list[float]
    expert_diversity: list[float]


def layer_statistics(
    counts_LE: Num[Tensor, "layers experts"], topk: float | Float[np.ndarray, " layers"] | None
) -> LayerStatistics:
    # Products of counts could overflow in smaller types.
    counts = (counts_LE if counts_LE.dtype == torch.int64 else counts_LE.to(torch.float64)).numpy()
    num_experts = counts.shape[1]
    shares = utilization(counts)
    # With p = u / E, exp(-sum p log p) / E is exp(-sum u log u / E). 0 * log(smallest) is 0, the limit of u log u.
    u_log_u = (shares * np.log(np.maximum(shares, _SMALLEST))).sum(1)
    cv = deviation_of_utilization(shares)
    rows = [shares.sum(1) / num_experts, cv, shares.max(1) - 1, np.minimum(np.exp(u_log_u / -num_experts), 1.0)]
    if topk is not None:
        variance = null_variance(counts, topk)
        rows += [np.sqrt(variance), excess_coefficient_of_variation(cv, variance)]
    live = np.count_nonzero(counts, axis=1)
    utilization_mean, cv_of_layers, max_violation, diversity, *noise = np.where(live > 0, rows, 0.0).tolist()
    return LayerStatistics(
        num_experts=[num_experts] * len(counts),
        utilization=torch.from_numpy(shares.reshape(-1)),
        utilization_mean=utilization_mean,
        cv=cv_of_layers,
        cv_null=noise[0] if noise else None,
        cv_excess=noise[1] if noise else None,
        max_violation=max_violation,
        dead_expert_frac=((num_experts - live) / num_experts).tolist(),
        expert_diversity=diversity,
    )


def joined(parts: Sequence[LayerStatistics], rows: Sequence[int]) -> LayerStatistics:
    """Return the statistics of several groups of layers as one. `rows` has each layer's position in the result."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    num_experts = [number for part in parts for number in part.num_experts]
    utilization = torch.cat([part.utilization for part in parts]).split(num_experts)

    def in_order(lists: Sequence[list[float] | None]) -> list[float]:
        values = [value for part in lists if part is not None for value in part]
        return [values[position] for position in order]

    noise_known = all(part.cv_null is not None for part in parts)
    return LayerStatistics(
        num_experts=[num_experts[position] for position in order],
        utilization=torch.cat([utilization[position] for position in order]),
        utilization_mean=in_order([part.utilization_mean for part in parts]),
        cv=in_order([part.cv for part in parts]),
        cv_null=in_order([part.cv_null for part in parts]) if noise_known else None,
        cv_excess=in_order([part.cv_excess for part in parts]) if noise_known else None,
        max_violation=in_order([part.max_violation for part in parts]),
        dead_expert_frac=in_order([part.dead_expert_frac for part in parts]),
        expert_diversity=in_order([part.expert_diversity for part in parts]),
    )

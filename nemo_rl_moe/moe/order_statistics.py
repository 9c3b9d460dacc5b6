# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values by rank in time linear in their number: sorting all of them would cost more than all other metrics together."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MAX_BUCKETS = 4096


def values_at_ranks(values: Float[Tensor, " n"], ranks: Sequence[int]) -> list[float]:
    """`sorted(values)[rank]` for each rank, exactly.

    Values go into equally wide buckets, which keeps their order; only the buckets in which a rank falls are sorted.

    Args:
        values: Finite numbers, at least one.
        ranks: From 0 to n - 1.
    """
    low, high = (float(bound) for bound in torch.aminmax(values))
    if low == high:
        return [low] * len(ranks)
    num_buckets = min(len(values), _MAX_BUCKETS)
    # Subtracting and scaling round monotonically, so no value lands in a bucket before that of a smaller one.
    buckets = ((values - low) * ((num_buckets - 1) / (high - low))).to(torch.int32)
    # How many values lie in this bucket and those before it.
    cumulative = torch.bincount(buckets, minlength=num_buckets).cumsum(0)
    bucket_of_rank = torch.searchsorted(cumulative, torch.tensor(ranks), right=True).tolist()
    contents: dict[int, tuple[int, list[float]]] = {}
    for bucket in set(bucket_of_rank):
        num_before = int(cumulative[bucket - 1]) if bucket else 0
        contents[bucket] = num_before, values[buckets == bucket].sort().values.tolist()
    return [contents[bucket][1][rank - contents[bucket][0]] for rank, bucket in zip(ranks, bucket_of_rank, strict=True)]


def positions_of_extremes(values: Float[Tensor, " n"], k: int) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"]]:
    """Positions of the k lowest and of the k highest values, each in ascending order of (value, position).

    Both are ends of one total order, so equal values cannot be picked differently from one run to the next, and the
    two ends do not meet while 2k <= n. A k above n means all.
    """
    k = min(k, len(values))
    if k < 1:
        none = torch.empty(0, dtype=torch.long)
        return none, none
    lowest = (values <= values.topk(k, largest=False).values[-1]).nonzero()[:, 0]
    highest = (values >= values.topk(k).values[-1]).nonzero()[:, 0]
    # Ties may make either longer than k.
    lowest = lowest[values[lowest].argsort(stable=True)[:k]]
    highest = highest[values[highest].argsort(stable=True)[-k:]]
    return lowest, highest

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values by rank in time linear in their number: sorting all of them would cost more than all the other metrics."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MAX_BUCKETS = 4096


def positions_at_ranks(values: Float[Tensor, " n"], ranks: Sequence[int]) -> Int[Tensor, " ranks"]:
    """Where the values of these ranks stand: `sorted(range(n), key=lambda i: (values[i], i))[rank]` for each rank.

    The order is total, so equal values cannot be picked differently from one run to the next. Values go into equally
    wide buckets, which keeps their order; only the buckets in which a rank falls are sorted.

    Args:
        values: Finite numbers, at least one.
        ranks: From 0 to n - 1, in any order.
    """
    wanted_ranks = torch.tensor(ranks, dtype=torch.long)
    low, high = torch.stack(torch.aminmax(values)).tolist()
    if low == high:
        return wanted_ranks
    num_buckets = min(len(values), _MAX_BUCKETS)
    # Subtracting and scaling round monotonically, so no value lands in a bucket before that of a smaller one.
    bucket_of_value = ((values - low) * ((num_buckets - 1) / (high - low))).to(torch.int32)
    size_of_bucket = torch.bincount(bucket_of_value, minlength=num_buckets)
    bucket_of_rank = torch.searchsorted(size_of_bucket.cumsum(0), wanted_ranks, right=True)
    is_wanted = torch.zeros(num_buckets, dtype=torch.bool)
    is_wanted[bucket_of_rank] = True
    candidates = is_wanted.index_select(0, bucket_of_value).nonzero()[:, 0]
    candidates = candidates[values[candidates].argsort(stable=True)]
    # Ranks among the candidates: less by those in buckets before that nobody wants.
    skipped = size_of_bucket.masked_fill(is_wanted, 0).cumsum(0)
    return candidates[wanted_ranks - skipped[bucket_of_rank]]

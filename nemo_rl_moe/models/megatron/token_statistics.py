# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and greedy matches from logits that are cut along the vocabulary."""

from typing import NamedTuple

import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor


class TokenStatistics(NamedTuple):
    """For each target token: its log-probability in nats, and whether no other token ranks before it."""

    logprobs: Float[Tensor, "rows columns"]
    greedy_matches: Bool[Tensor, "rows columns"]


def token_statistics(
    logits: Float[Tensor, "rows columns local_vocabulary"],
    labels: Int[Tensor, "rows columns"],
    group: dist.ProcessGroup,
) -> TokenStatistics:
    """Log-softmax at the labels, without gathering the vocabulary.

    Args:
        logits: This tensor-parallel rank's columns of the vocabulary.
        labels: Global token ids.
        group: The tensor-parallel group; rank r holds the r-th block of the vocabulary.
    """
    logits = logits.float()
    local = labels - group.rank() * logits.shape[-1]
    held = (local >= 0) & (local < logits.shape[-1])
    target = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0].where(held, 0.0)
    highest = logits.amax(-1)
    _all_reduce(highest, dist.ReduceOp.MAX, group)
    exponentials = (logits - highest[..., None]).exp_().sum(-1)
    _all_reduce(exponentials, dist.ReduceOp.SUM, group)
    _all_reduce(target, dist.ReduceOp.SUM, group)
    return TokenStatistics(target - highest - exponentials.log(), target >= highest)


def _all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What one data-parallel rank gets of a batch: its microbatches, and the totals of the whole global batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_moe.distributed.token_batch import TokenBatch


@dataclass(frozen=True)
class GlobalBatchShard:
    """One data-parallel rank's part of one global batch.

    Attributes:
        microbatches: In the order in which they run; every rank has as many.
        global_valid_tokens: Targets that count in the loss, over all ranks.
        global_sequences: Sequences that hold such a target, over all ranks.
    """

    microbatches: tuple[TokenBatch, ...]
    global_valid_tokens: int
    global_sequences: int


def count_trained_sequences(batch: TokenBatch) -> int:
    """Number of sequences with at least one token that counts in the loss."""
    return int(batch.token_mask[:, 1:].any(dim=1).sum())


def make_shard(batch: TokenBatch, microbatches: Sequence[Sequence[int]], totals: TokenBatch) -> GlobalBatchShard:
    """Cuts one rank's microbatches out of a batch.

    Args:
        batch: The batch that the indices refer to.
        microbatches: Indices of each microbatch's sequences.
        totals: The whole global batch that the loss is normalised by.
    """
    return GlobalBatchShard(
        microbatches=tuple(batch.select(indices) for indices in microbatches),
        global_valid_tokens=totals.num_valid_tokens(),
        global_sequences=count_trained_sequences(totals),
    )

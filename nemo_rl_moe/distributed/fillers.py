# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences that only fill up a batch, so that every rank has something to run."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_moe.distributed.token_batch import TokenBatch


def append_fillers(batch: TokenBatch, fillers: Sequence[int]) -> TokenBatch:
    """The batch with some of its sequences once more at its end, none of whose tokens count in the loss.

    Args:
        batch: The batch.
        fillers: Indices of the sequences to repeat, as `EvaluationPlan.fillers` lists them.
    """
    if not fillers:
        return batch
    filled = batch.select([*range(len(batch)), *fillers])
    token_mask = filled.token_mask.clone()
    token_mask[len(batch) :] = False
    return replace(filled, token_mask=token_mask)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences that ranks share: each holds two of their chunks, one from either half, and attends to all keys."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from transformer_engine.pytorch.distributed import gather_rows


def positions_of_rank(length: int, rank: int, size: int) -> Tensor:
    """Return the positions of one sequence that a rank holds: of `2 size` chunks the one of its number from either
    end.
    """
    chunk, rest = divmod(length, 2 * size)
    if rest:
        raise AssertionError("Sequence length does not meet divisible requirements!")
    first = torch.arange(rank * chunk, (rank + 1) * chunk)
    return torch.cat([first, first + (2 * (size - rank) - 1) * chunk])


def gather_sequences(part: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the whole sequences, one behind the other on the first axis; gradients of all ranks add up on the one
    that holds.
    """
    size = group.size()
    gathered = gather_rows(part, group).unflatten(0, (size, -1))
    whole = part.new_empty((sum(lengths), *part.shape[1:]))
    begin = 0
    for length in lengths:
        here = slice(begin // size, (begin + length) // size)
        for rank in range(size):
            whole = whole.index_copy(0, begin + positions_of_rank(length, rank, size), gathered[rank, here])
        begin += length
    return whole

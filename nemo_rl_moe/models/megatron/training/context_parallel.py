# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Columns of each context-parallel rank, and the gather that joins them to full rows.

Each sequence is cut into `2 n` chunks for `n` ranks, and rank `r` holds chunks `r` and `2 n - 1 - r`. Under a causal
mask early tokens attend to few tokens and late tokens to many, so this gives all ranks equal work. Transformer Engine's
attention expects this order, in padded rows and in each packed sequence separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from megatron.core import parallel_state
from torch import Tensor

from nemo_rl_moe.config.schema_policy import sequence_multiple
from nemo_rl_moe.distributed.batch import to_device


class ContextPlace(NamedTuple):
    """Position of a rank in its context-parallel group, whose ranks share each sequence."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def sequence_multiple(self) -> int:
        return sequence_multiple(self.size)


ALONE = ContextPlace()
"""The position of a rank that holds entire sequences."""


def place_of_rank() -> ContextPlace:
    group = parallel_state.get_context_parallel_group()
    return ContextPlace(group.rank(), group.size(), group) if group.size() > 1 else ALONE


def zigzag_columns(segments: Sequence[int], num_ranks: int) -> Int[Tensor, "ranks local_columns"]:
    """Return the columns that each rank holds: chunks `r` and `2 n - 1 - r` of each segment for rank `r` of `n`.

    A segment is a row or a packed sequence. It is cut into `2 n` equal chunks.

    Args:
        segments: Number of columns of each segment.
    """
    num_chunks = 2 * num_ranks
    if wrong := [length for length in segments if length % num_chunks]:
        raise ValueError(f"a row or packed sequence of {wrong[0]} tokens cannot be cut into {num_chunks} equal chunks")
    first = torch.arange(num_ranks)
    chunks_of_ranks = torch.stack([first, num_chunks - 1 - first], 1)
    columns = torch.arange(sum(segments)).split(list(segments))
    return torch.cat([each.view(num_chunks, -1)[chunks_of_ranks].flatten(1) for each in columns], 1)


@dataclass(frozen=True)
class ContextCut:
    """Columns of a microbatch's rows that one rank holds, and the order to join the columns of all ranks.

    Attributes:
        held: Columns of this rank.
        local: For each column of the full rows, its index in this rank's columns, or -1 if another rank has it.
        order: For each column of the full rows, its index in the concatenated columns of all ranks.
    """

    held: Int[Tensor, " local_columns"]
    local: Int[Tensor, " columns"]
    order: Int[Tensor, " columns"]
    group: dist.ProcessGroup | None

    @staticmethod
    def of(segments: Sequence[int], place: ContextPlace) -> "ContextCut | None":
        """Return the cut of a row of segments (packed sequences or one row), or None if one rank holds the row.

        The cut's tensors are on the host.
        """
        if place.size == 1:
            return None
        columns = zigzag_columns(segments, place.size)
        held = columns[place.rank]
        local = torch.full((columns.numel(),), -1)
        local[held] = torch.arange(len(held))
        return ContextCut(held, local, columns.flatten().argsort(), place.group)

    def to(self, device: torch.device) -> "ContextCut":
        held, local, order = (to_device(each, device) for each in (self.held, self.local, self.order))
        return ContextCut(held, local, order, self.group)

    def part(self, values: Shaped[Tensor, "rows columns ..."]) -> Shaped[Tensor, "rows local_columns ..."]:
        return values.index_select(1, self.held)

    def whole(self, values: Shaped[Tensor, "rows local_columns ..."]) -> Shaped[Tensor, "rows columns ..."]:
        """Return full rows, joined from the columns of all ranks. All ranks of the group call it.

        All ranks compute the same with the full rows, so each rank gets the full gradient. The backward pass selects
        the gradient of the rank's own columns, without a collective.
        """
        gathered: Tensor = _BroughtTogether.apply(values, self)
        return gathered


class _BroughtTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cut: ContextCut) -> Tensor:
        ctx.cut = cut
        assert cut.group is not None
        # Sent as bytes, because collectives do not support every type.
        own = values.detach().contiguous()
        gathered = own.new_empty((cut.group.size() * len(own), *own.shape[1:]))
        dist.all_gather_into_tensor(gathered.view(torch.uint8), own.view(torch.uint8), group=cut.group)
        by_rank = gathered.unflatten(0, (cut.group.size(), -1))
        return by_rank.transpose(0, 1).flatten(1, 2).index_select(1, cut.order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.cut.part(gradients[0]), None

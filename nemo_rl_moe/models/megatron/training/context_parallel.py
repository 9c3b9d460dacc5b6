# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Columns of each context-parallel rank, and rows that are brought together again.

Each sequence is cut into twice as many chunks as there are ranks; rank `r` of `n` holds chunks `r` and `2 n - 1 - r`.
Under a causal mask early tokens have little to attend to and late ones much, so that every rank has as much work. It is
the order that Transformer Engine's attention expects, of whole rows and of each packed sequence by itself.
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
    """Place of a rank among those that share each sequence."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def sequence_multiple(self) -> int:
        return sequence_multiple(self.size)


ALONE = ContextPlace()
"""Place of a rank that holds whole sequences."""


def place_of_rank() -> ContextPlace:
    group = parallel_state.get_context_parallel_group()
    return ContextPlace(group.rank(), group.size(), group) if group.size() > 1 else ALONE


def zigzag_columns(segments: Sequence[int], num_ranks: int) -> Int[Tensor, "ranks local_columns"]:
    """Return the columns that each rank holds; each segment (a row, or a packed sequence) is split by itself."""
    num_chunks = 2 * num_ranks
    if wrong := [length for length in segments if length % num_chunks]:
        raise ValueError(f"a segment of {wrong[0]} columns cannot be cut into {num_chunks} equal chunks")
    first, start = torch.arange(num_ranks), 0
    chunks_of_ranks = torch.stack([first, num_chunks - 1 - first], 1)
    held = []
    for length in segments:
        held.append(torch.arange(start, start + length).view(num_chunks, -1)[chunks_of_ranks].flatten(1))
        start += length
    return torch.cat(held, 1)


@dataclass(frozen=True)
class ContextCut:
    """Columns of a microbatch's rows that one rank holds, and how those of all ranks are brought together.

    Attributes:
        held: Columns of this rank.
        local: For each column of the whole rows its place among those of this rank; -1 where another rank has it.
        order: For each column of the whole rows its place in all ranks' columns, one rank behind the other.
    """

    held: Int[Tensor, " local_columns"]
    local: Int[Tensor, " columns"]
    order: Int[Tensor, " columns"]
    group: dist.ProcessGroup | None

    @staticmethod
    def of(segments: Sequence[int], place: ContextPlace) -> "ContextCut | None":
        """Return the cut of a row that consists of these segments, on the host; None where one rank holds all of it."""
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
        """Join the columns of all ranks, every one of which calls it, into whole rows.

        All ranks go on with the same rows, so that each has the whole gradient of its own columns: in the backward pass
        it takes these, and nothing is sent.
        """
        gathered: Tensor = _BroughtTogether.apply(values, self)
        return gathered


class _BroughtTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cut: ContextCut) -> Tensor:
        ctx.cut = cut
        assert cut.group is not None
        # As bytes: collectives do not know every type.
        own = values.detach().contiguous()
        gathered = own.new_empty((cut.group.size() * len(own), *own.shape[1:]))
        dist.all_gather_into_tensor(gathered.view(torch.uint8), own.view(torch.uint8), group=cut.group)
        by_rank = gathered.unflatten(0, (cut.group.size(), -1))
        return by_rank.transpose(0, 1).flatten(1, 2).index_select(1, cut.order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.cut.part(gradients[0]), None

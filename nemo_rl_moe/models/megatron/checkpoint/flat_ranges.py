# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranges of flattened parameters as boxes of full tensors.

The distributed optimizer splits the flattened parameters into equal ranges for the data-parallel ranks, without regard
to rows. A range of a tensor in row-major order is the end of a row, complete rows, and the beginning of a row. The two
partial rows are split again, in one dimension less. This makes at most `2 n - 1` boxes in `n` dimensions. torch's
distributed format stores and reads arbitrary boxes, so each rank writes and reads only its range, in any combination of
layouts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Shaped
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


class Box(NamedTuple):
    """A box of a tensor, by its offset and size in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together cover the entries `start` to `stop` of a tensor's flattened form, in their order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,)[: len(shape)], (stop - start,)[: len(shape)])
        return
    row = math.prod(shape[1:])
    first_full, end_full = -(-start // row), stop // row
    if first_full > end_full:  # within one row
        yield from _in_row(shape, end_full, start - end_full * row, stop - end_full * row)
        return
    if start < first_full * row:
        yield from _in_row(shape, first_full - 1, start - (first_full - 1) * row, row)
    if first_full < end_full:
        yield Box((first_full, *(0 for _ in shape[1:])), (end_full - first_full, *shape[1:]))
    yield from _in_row(shape, end_full, 0, stop - end_full * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, size in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *offset), (1, *size))


def sharded_range(
    parameter: ShardedTensor | ShardedTensorFactory,
    start: int,
    values: Shaped[Tensor, " range"],
    *,
    prefix: str,
    replica: int,
) -> list[ShardedTensor]:
    """Return the values of a range of a flattened parameter as pieces of tensors with the parameter's full shape.

    The pieces are views of `values`, for a checkpoint.

    Args:
        start: Beginning of the range in the flattened parameter.
        values: One value for each entry of the range, such as a moment.
        replica: Replica index among the ranks with the same parameters. Only the first replica is written.
    """
    pieces = []
    stop = start + values.numel()
    for part in [parameter] if isinstance(parameter, ShardedTensor) else nested_values(parameter.build()):
        begin = _offset_in(part.data, parameter.data, part.key)
        inside = max(start, begin), min(stop, begin + part.data.numel())
        for box in boxes_of_range(part.local_shape, inside[0] - begin, inside[1] - begin):
            size = math.prod(box.shape)
            pieces.append(_piece(part, box, values[inside[0] - start :][:size], prefix, replica))
            inside = inside[0] + size, inside[1]
    return pieces


def _offset_in(part: Tensor, parameter: Tensor, name: str) -> int:
    """Return the offset of a part in the flattened parameter."""
    shared = part.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    if not (shared and part.is_contiguous() and parameter.is_contiguous()):
        raise ValueError(f"{name}: its tensors in a checkpoint are no contiguous blocks of the parameter")
    return int(part.storage_offset() - parameter.storage_offset())


def _piece(part: ShardedTensor, box: Box, values: Tensor, prefix: str, replica: int) -> ShardedTensor:
    axes = part.prepend_axis_num
    offsets = (
        *part.global_offset[:axes],
        *(at + inner for at, inner in zip(part.global_offset[axes:], box.offset, strict=True)),
    )
    shape = (*(1 for _ in range(axes)), *box.shape)
    replica_id: Any = (*part.replica_id[:2], replica)  # pipeline, tensor, data
    return replace(
        part,
        key=f"{prefix}.{part.key}",
        data=values.view(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_offset=offsets,
        axis_fragmentations=None,  # boxes differ in size
        prepend_axis_num=0,
        replica_id=replica_id,
    )

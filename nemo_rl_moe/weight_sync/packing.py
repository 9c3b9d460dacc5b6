# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors packed one after another into a buffer. The buffer is sent in one piece."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

_ALIGNMENT = 16

Row = tuple[str, str, Sequence[int]]
"""Name, number format such as `bfloat16`, and shape of a tensor."""


def row_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Row:
    return name, str(dtype).removeprefix("torch."), list(shape)


@dataclass(frozen=True)
class Packing:
    """Layout of tensors in a buffer, each aligned to 16 bytes."""

    rows: Sequence[Row]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls([row_of(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])

    @property
    def num_bytes(self) -> int:
        """Number of bytes, including padding."""
        return sum(_padded(num_bytes) for *_, num_bytes in self._sizes())

    def cut(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors in the buffer's memory."""
        found, begin = {}, 0
        for name, dtype, shape, num_bytes in self._sizes():
            found[name] = buffer[begin : begin + num_bytes].view(dtype).view(tuple(shape))
            begin += _padded(num_bytes)
        return found

    def _sizes(self) -> Iterator[tuple[str, torch.dtype, Sequence[int], int]]:
        for name, kind, shape in self.rows:
            dtype: torch.dtype = getattr(torch, kind)
            yield name, dtype, shape, prod(shape) * dtype.itemsize


def packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a new buffer with tensors in the layout of `Packing`, `[bytes]`."""
    buffer = torch.empty(sum(map(_padded, (tensor.nbytes for tensor in tensors))), dtype=torch.uint8, device=device)
    begin = 0
    for tensor in tensors:
        # Viewed in the tensor's format, so that any strides need only one copy on the device.
        buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        begin += _padded(tensor.nbytes)
    return buffer


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

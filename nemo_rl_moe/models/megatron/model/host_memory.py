# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Host memory for tensors of a device, with several tensors in one allocation."""

from collections.abc import Sequence

import torch
from torch import Tensor

SLAB_BYTES = 2**30
"""Size of an allocation in bytes: a power of two, because torch rounds pinned allocations up to one."""
_ALIGNMENT = 64


def host_tensors(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return uninitialized tensors in host memory with the shapes and types of `tensors`."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    left = sum(sizes)
    slab, offset = torch.empty(0, dtype=torch.uint8), 0
    found = []
    for tensor, size in zip(tensors, sizes, strict=True):
        if offset + size > len(slab):
            slab, offset = torch.empty(max(size, min(SLAB_BYTES, left)), dtype=torch.uint8, pin_memory=pinned), 0
        found.append(slab[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        offset, left = offset + size, left - size
    return found


def fit(kept: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors have the same shapes and types."""
    return [(t.shape, t.dtype) for t in kept] == [(t.shape, t.dtype) for t in tensors]

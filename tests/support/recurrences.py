# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of a recurrence in chunks with the plain one, with gradients, and packed sequences for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

EXACT = 1e-11
"""Relative to numbers of about 1, in float64."""
LENGTHS = ([5, 70, 1, 20], [64, 64], [3], [1, 1, 1, 1], [9, 7, 8])
"""Lengths of packed sequences, around chunks of 8 and 64."""


def with_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def gradients(output: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a fixed mixture of all outputs."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=output.dtype)
    return torch.autograd.grad((output * weights).sum(), tensors)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = EXACT) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def boundaries(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

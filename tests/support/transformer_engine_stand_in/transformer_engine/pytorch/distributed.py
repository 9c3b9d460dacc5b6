# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random states and recomputation, which Megatron-Core uses for 8-bit formats alone; and what tensor parallelism sends.

The four functions on tensors change nothing on one rank. Sequences lie on the first axis.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class CudaRNGStatesTracker:
    """Random states by name; never used."""

    def reset(self) -> None:
        """Forget them."""


def checkpoint(*args: object, **kwargs: object) -> NoReturn:
    """Recomputation for 8-bit formats."""
    raise NotImplementedError("no 8-bit formats without a GPU")


def activation_recompute_forward(*args: object, **kwargs: object) -> NoReturn:
    """Recomputation for 8-bit formats."""
    raise NotImplementedError("no 8-bit formats without a GPU")


def is_fp8_activation_recompute_enabled() -> bool:
    """Return False."""
    return False


def get_all_rng_states() -> dict[str, Tensor]:
    """Return None."""
    return {}


def _sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    summed = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


def _gather(part: Tensor, group: ProcessGroup) -> Tensor:
    whole = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def _scatter_sum(whole: Tensor, group: ProcessGroup) -> Tensor:
    part = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter_sum(gradient, ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.group), None


def gather_rows(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the parts of all ranks one behind the other; their gradients of a part add up on the rank that holds
    it.
    """
    gathered: Tensor = _Gather.apply(part, group)
    return gathered


def enter_columns(tensor: Tensor, group: ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Return the whole input of a layer that is cut along its outputs; its gradients add up over the ranks."""
    return (_Gather if sequence_parallel else _SumGradients).apply(tensor, group)


def leave_rows(tensor: Tensor, group: ProcessGroup, *, sequence_parallel: bool) -> Tensor:
    """Return the sum of the parts of a layer that is cut along its inputs; of this rank's sequence alone if that is
    cut.
    """
    return (_ScatterSum if sequence_parallel else _Sum).apply(tensor, group)

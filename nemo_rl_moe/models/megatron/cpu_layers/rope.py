# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: cached cosines and sines, one node of the graph."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

_CACHED_LENGTHS = 64
_cache: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = OrderedDict()


def cosines_and_sines(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of Megatron's rotary angles, computed once for all layers and microbatches.

    Args:
        angles: `[positions, 1, 1, dim]`, never changed in place.
        dtype: Type of the result.

    Returns:
        Two tensors shaped like `angles`.
    """
    key = (angles.data_ptr(), tuple(angles.shape), angles.stride(), dtype)
    entry = _cache.get(key)
    if entry is None:
        # Tensors made in inference mode could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            # The angles are kept as well: while they live, no other tensor has their address.
            entry = (angles.cos().to(dtype), angles.sin().to(dtype), angles)
        _cache[key] = entry
        if len(_cache) > _CACHED_LENGTHS:
            _cache.popitem(last=False)
    return entry[0], entry[1]


def rotate(inputs: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates the halves of the last dimension against each other, into a new tensor.

    Args:
        inputs: `[..., dim]`.
        cosines: Broadcasts against `inputs`; its halves are equal.
        sines: As `cosines`. Negative sines rotate back.
    """
    half = inputs.size(-1) // 2
    rotated = inputs * cosines
    rotated[..., :half].addcmul_(inputs[..., half:], sines[..., :half], value=-1)
    rotated[..., half:].addcmul_(inputs[..., :half], sines[..., half:])
    return rotated


def rotate_back(grad: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The gradient of `rotate` with respect to its inputs."""
    half = grad.size(-1) // 2
    result = grad * cosines
    result[..., :half].addcmul_(grad[..., half:], sines[..., half:])
    result[..., half:].addcmul_(grad[..., :half], sines[..., :half], value=-1)
    return result


class RotaryFunction(torch.autograd.Function):
    """`rotate` with a gradient for the inputs only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotated inputs."""
        ctx.save_for_backward(cosines, sines)
        return rotate(inputs, cosines, sines)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rotates the gradient back."""
        return rotate_back(grad, *ctx.saved_tensors), None, None

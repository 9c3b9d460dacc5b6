# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""RMSNorm for Megatron-Core's layer spec, where Transformer Engine is missing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig


def rms_normalize(inputs: Tensor, eps: float) -> Tensor:
    """`inputs / rms(inputs)` over the last dimension, without a gradient."""
    return inputs * inputs.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()


class RMSNormFunction(torch.autograd.Function):
    """RMS normalisation over the last dimension as one node of the graph, for float32."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `inputs / rms(inputs) * weight`; any shape `[..., hidden]`."""
        inverse_rms = inputs.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normalized = inputs * inverse_rms
        ctx.save_for_backward(normalized, inverse_rms, weight)
        return normalized * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of inputs and weight."""
        normalized, inverse_rms, weight = ctx.saved_tensors
        hidden = normalized.size(-1)
        grad_weight = (grad * normalized).reshape(-1, hidden).sum(0)
        grad_normalized = grad * weight
        projection = (grad_normalized * normalized).sum(-1, keepdim=True).div_(-hidden)
        return grad_normalized.addcmul_(normalized, projection).mul_(inverse_rms), grad_weight, None


class RMSNorm(torch.nn.Module):
    """RMSNorm that knows sequence parallelism, which Megatron's wrapper of the torch norm refuses.

    Args:
        config: Gives the parameter's type and whether sequence parallelism is on.
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        **_others: What some versions of Megatron-Core pass to every norm (`has_residual`, `name`); nothing to do here.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_others: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the sequence, so the gradient must be summed over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalises `[..., hidden]`; statistics are float32 for every type."""
        if inputs.dtype == torch.float32 and self.weight.dtype == torch.float32:
            return RMSNormFunction.apply(inputs, self.weight, self.eps)
        return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps)

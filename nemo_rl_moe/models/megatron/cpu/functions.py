# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers, norms, rotary embedding and cross entropy as single autograd functions."""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class CrossEntropyFunction(torch.autograd.Function):
    """Token losses of `[tokens, vocabulary]` logits, with one buffer for the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the losses `[tokens]` in float32."""
        logits = logits.float()
        log_total = torch.logsumexp(logits, -1, keepdim=True)
        outside = (targets < 0) | (targets >= logits.size(-1))
        rows = targets.masked_fill(outside, 0).unsqueeze(-1)
        ctx.save_for_backward(logits, log_total, rows, outside)
        return (log_total - logits.gather(-1, rows)).squeeze(-1).masked_fill_(outside, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return `(softmax - one_hot(target)) * grad`."""
        logits, log_total, rows, outside = ctx.saved_tensors
        grad_logits = (logits - log_total).exp_()
        grad_logits.scatter_add_(-1, rows, torch.full_like(log_total, -1.0))
        return grad_logits.mul_(grad.masked_fill(outside, 0.0).unsqueeze(-1)), None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute each token's loss in nats, float32 `[batch, sequence]`, from `[sequence, batch, vocabulary]` logits.

    A label outside the vocabulary (such as -100) has loss and gradient zero.
    """
    sequence, batch, vocabulary = logits.shape
    losses = CrossEntropyFunction.apply(logits.reshape(-1, vocabulary), labels.t().reshape(-1))
    return losses.view(sequence, batch).t()


def _multiply(
    layer: ColumnParallelLinear | RowParallelLinear, inputs: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Multiply `[..., input_size]` by the weight. Return the product, and the bias if the caller adds it."""
    if layer.skip_bias_add:
        return F.linear(inputs, weight), layer.bias
    return F.linear(inputs, weight, layer.bias), None


class PlainColumnLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` for a tensor-parallel group of one rank."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return _multiply(self, input_, self.weight if weight is None else weight)


class PlainRowLinear(RowParallelLinear):
    """`RowParallelLinear` for a tensor-parallel group of one rank."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return _multiply(self, input_, self.weight)


def rms_normalize(inputs: Tensor, eps: float) -> Tensor:
    """Compute `inputs / rms(inputs)` over the last dimension, without a gradient."""
    return inputs * inputs.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()


class RMSNormFunction(torch.autograd.Function):
    """`inputs / rms(inputs) * weight` over the last dimension of `[..., hidden]`, as one autograd node, for float32."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = inputs.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normalized = inputs * inverse_rms
        ctx.save_for_backward(normalized, inverse_rms, weight)
        return normalized * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normalized, inverse_rms, weight = ctx.saved_tensors
        hidden = normalized.size(-1)
        grad_weight = (grad * normalized).reshape(-1, hidden).sum(0)
        grad_normalized = grad * weight
        projection = (grad_normalized * normalized).sum(-1, keepdim=True).div_(-hidden)
        return grad_normalized.addcmul_(normalized, projection).mul_(inverse_rms), grad_weight, None


class RMSNorm(torch.nn.Module):
    """RMSNorm with sequence parallelism, which Megatron's wrapper of torch's norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_others: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor-parallel rank sees a part of the sequence, so the ranks must sum their gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def factors(self) -> Tensor:
        """Factors of the normalised entries, `[hidden]`."""
        return self.weight

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype == torch.float32 and self.weight.dtype == torch.float32:
            return RMSNormFunction.apply(inputs, self.factors, self.eps)
        return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm with the factors `1 + weight`, computed in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any):
        super().__init__(config, hidden_size, eps, **others)
        torch.nn.init.zeros_(self.weight)

    @property
    def factors(self) -> Tensor:
        return 1 + self.weight

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype == torch.float32 and self.weight.dtype == torch.float32:
            return super().forward(inputs)
        factors = 1 + self.weight.float()
        return F.rms_norm(inputs.float(), factors.shape, factors, self.eps).to(inputs.dtype)


_CACHED_LENGTHS, _CACHED_MICROBATCHES = 64, 2
_Cache = OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]]
_cache: _Cache = OrderedDict()
_cache_of_microbatches: _Cache = OrderedDict()


def cosines_and_sines(angles: Tensor, dtype: torch.dtype, *, of_microbatch: bool = False) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of Megatron's rotary angles, computed once for all layers and microbatches.

    Args:
        of_microbatch: Whether the angles belong to one microbatch. If so, only the results for the last few such
            microbatches stay in the cache.
    """
    key = (angles.data_ptr(), tuple(angles.shape), angles.stride(), dtype)
    cache, most = (_cache_of_microbatches, _CACHED_MICROBATCHES) if of_microbatch else (_cache, _CACHED_LENGTHS)
    entry = cache.get(key)
    if entry is None:
        # Tensors made in inference mode could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            # The cache keeps the angles alive, so that no other tensor gets their address.
            entry = (angles.cos().to(dtype), angles.sin().to(dtype), angles)
        cache[key] = entry
        if len(cache) > most:
            cache.popitem(last=False)
    return entry[0], entry[1]


def rotate(inputs: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary embedding, and return a new tensor.

    Entry `i` of the first half of the last dimension forms a pair with entry `i` of the second half.

    If there are fewer cosines than entries, only the first entries are rotated: as many as there are cosines.
    """
    rotated_part = cosines.size(-1)
    if rotated_part < inputs.size(-1):
        return torch.cat([rotate(inputs[..., :rotated_part], cosines, sines), inputs[..., rotated_part:]], -1)
    half = inputs.size(-1) // 2
    rotated = inputs * cosines
    rotated[..., :half].addcmul_(inputs[..., half:], sines[..., :half], value=-1)
    rotated[..., half:].addcmul_(inputs[..., :half], sines[..., half:])
    return rotated


def rotate_back(grad: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return the gradient of `rotate` with respect to its inputs."""
    rotated_part = cosines.size(-1)
    if rotated_part < grad.size(-1):
        return torch.cat([rotate_back(grad[..., :rotated_part], cosines, sines), grad[..., rotated_part:]], -1)
    half = grad.size(-1) // 2
    result = grad * cosines
    result[..., :half].addcmul_(grad[..., half:], sines[..., half:])
    result[..., half:].addcmul_(grad[..., :half], sines[..., :half], value=-1)
    return result


class RotaryFunction(torch.autograd.Function):
    """`rotate` with a gradient for the inputs only."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return rotate(inputs, cosines, sines)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rotate_back(grad, *ctx.saved_tensors), None, None

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Query and key norm, rotary embedding and causal attention as one node of the graph, for short float32 sequences."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu_layers.rope import rotate_back

LONGEST_SEQUENCE = 192
"""Up to here keeping the scores `[queries, keys]` is faster than torch's attention, which computes them again."""


@dataclass(frozen=True)
class HeadLayout:
    """How Megatron-Core mixes queries, keys and values: for each group its query heads, its key and its value.

    Attributes:
        groups: Query groups on this rank.
        heads_per_group: Query heads that share one key.
        dim: Size of a head.
    """

    groups: int
    heads_per_group: int
    dim: int


@functools.lru_cache(maxsize=32)
def _added_mask(sequence: int, heads_per_group: int) -> Tensor:
    """Minus infinity where a query must not look, `[heads_per_group * sequence, sequence]`."""
    # A tensor made in inference mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        return torch.full((sequence, sequence), float("-inf")).triu_(1).repeat(heads_per_group, 1)


class FusedAttentionFunction(torch.autograd.Function):
    """From mixed queries, keys and values to the context. The formulas are those of the separate modules."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        cosines: Tensor,
        sines: Tensor,
        eps: float,
        scale: float,
        layout: HeadLayout,
    ) -> Tensor:
        """Attends.

        Args:
            ctx: Of autograd.
            mixed: `[sequence, batch, groups * (heads_per_group + 2) * dim]`.
            query_weight: `[dim]`, of the RMS norm of each query head.
            key_weight: As `query_weight`, of the keys.
            cosines: `[sequence, 1, 1, dim]`.
            sines: As `cosines`.
            eps: Of both norms.
            scale: Factor of the scores.
            layout: How `mixed` is laid out.

        Returns:
            `[sequence, batch, groups * heads_per_group * dim]`.
        """
        sequence, batch, _ = mixed.shape
        groups, heads, dim = layout.groups, layout.heads_per_group, layout.dim
        half = dim // 2
        split = mixed.view(sequence, batch, groups, heads + 2, dim)
        # Queries and keys are normalised and rotated together; their weights differ.
        queries_and_keys = split[..., : heads + 1, :]
        inverse_rms = queries_and_keys.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normalized = queries_and_keys * inverse_rms
        weight = torch.cat([query_weight.expand(heads, dim), key_weight.view(1, dim)])
        cosines, sines = cosines.view(sequence, 1, 1, 1, dim), sines.view(sequence, 1, 1, 1, dim)
        rotated = normalized * (cosines * weight)
        swapped = sines * torch.cat([-weight[:, half:], weight[:, :half]], -1)
        rotated[..., :half].addcmul_(normalized[..., half:], swapped[..., :half])
        rotated[..., half:].addcmul_(normalized[..., :half], swapped[..., half:])
        # The heads of a group share its key: together they are one long list of queries.
        query = rotated[..., :heads, :].permute(1, 2, 3, 0, 4).reshape(batch * groups, heads * sequence, dim)
        key = rotated[..., heads, :].permute(1, 2, 0, 3).reshape(batch * groups, sequence, dim)
        value = split[..., heads + 1, :].permute(1, 2, 0, 3).reshape(batch * groups, sequence, dim)
        scores = torch.baddbmm(_added_mask(sequence, heads), query, key.transpose(1, 2), alpha=scale)
        probs = torch.softmax(scores, -1)
        context = torch.bmm(probs, value)
        ctx.save_for_backward(normalized, inverse_rms, weight, cosines, sines, query, key, value, probs)
        ctx.scale, ctx.layout = scale, layout
        return context.view(batch, groups, heads, sequence, dim).permute(3, 0, 1, 2, 4).reshape(sequence, batch, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `mixed` and of the two norm weights."""
        normalized, inverse_rms, weight, cosines, sines, query, key, value, probs = ctx.saved_tensors
        groups, heads, dim = ctx.layout.groups, ctx.layout.heads_per_group, ctx.layout.dim
        sequence, batch, _ = grad.shape
        grad = grad.reshape(sequence, batch, groups, heads, dim).permute(1, 2, 3, 0, 4)
        grad = grad.reshape(batch * groups, heads * sequence, dim)
        grad_mixed = grad.new_empty(sequence, batch, groups, heads + 2, dim)
        grad_value = torch.bmm(probs.transpose(1, 2), grad)
        grad_mixed[..., heads + 1, :] = grad_value.view(batch, groups, sequence, dim).permute(2, 0, 1, 3)
        grad_probs = torch.bmm(grad, value.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, torch.float32)
        grad_query = torch.bmm(grad_scores, key).view(batch, groups, heads, sequence, dim)
        grad_key = torch.bmm(grad_scores.transpose(1, 2), query).view(batch, groups, sequence, dim)
        grad_rotated = grad.new_empty(sequence, batch, groups, heads + 1, dim)
        torch.mul(grad_query.permute(3, 0, 1, 2, 4), ctx.scale, out=grad_rotated[..., :heads, :])
        torch.mul(grad_key.permute(2, 0, 1, 3), ctx.scale, out=grad_rotated[..., heads, :])
        grad_weighted = rotate_back(grad_rotated, cosines, sines)
        grad_weight = (grad_weighted * normalized).sum((0, 1, 2))
        grad_normalized = grad_weighted.mul_(weight)
        projection = (grad_normalized * normalized).sum(-1, keepdim=True).div_(-dim)
        grad_normalized.addcmul_(normalized, projection)
        torch.mul(grad_normalized, inverse_rms, out=grad_mixed[..., : heads + 1, :])
        grad_mixed = grad_mixed.view(sequence, batch, -1)
        return grad_mixed, grad_weight[:heads].sum(0), grad_weight[heads], None, None, None, None, None

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Query and key norms, rotary embedding and causal attention as one autograd node, for short float32 sequences."""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import (
    PaddedBatch,
    causal_attention,
    packed_lengths,
    require_causal,
    tree_attention,
    worth_padding,
)
from nemo_rl_moe.models.megatron.cpu.functions import RMSNorm, RotaryFunction, cosines_and_sines, rotate_back
from nemo_rl_moe.models.megatron.training.prefix_tree import tree_of

LONGEST_SEQUENCE = 192
"""Up to this length, keeping the scores `[queries, keys]` is faster than torch's attention, which recomputes them."""


@dataclass(frozen=True)
class HeadLayout:
    """Layout of Megatron-Core's fused queries, keys and values: each group has query heads, then a key and a value."""

    groups: int
    heads_per_group: int
    dim: int


@functools.lru_cache(maxsize=32)
def _added_mask(sequence: int, heads_per_group: int) -> Tensor:
    """Return an additive causal mask `[heads_per_group * sequence, sequence]`."""
    # A tensor made in inference mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        return torch.full((sequence, sequence), float("-inf")).triu_(1).repeat(heads_per_group, 1)


class FusedAttentionFunction(torch.autograd.Function):
    """Attention from mixed queries, keys and values, with the formulas of the separate modules."""

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
        """Compute attention.

        Args:
            mixed: `[sequence, batch, groups * (heads_per_group + 2) * dim]`.
            query_weight: `[dim]`, weight of the RMS norm of each query head.
            key_weight: `[dim]`, weight of the RMS norm of each key.
            cosines: `[sequence, 1 or batch, 1, dim]`, like `sines`.

        Returns:
            `[sequence, batch, groups * heads_per_group * dim]`.
        """
        sequence, batch, _ = mixed.shape
        groups, heads, dim = layout.groups, layout.heads_per_group, layout.dim
        half = dim // 2
        split = mixed.view(sequence, batch, groups, heads + 2, dim)
        # Queries and keys are normalised and rotated together, with different weights.
        queries_and_keys = split[..., : heads + 1, :]
        inverse_rms = queries_and_keys.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normalized = queries_and_keys * inverse_rms
        weight = torch.cat([query_weight.expand(heads, dim), key_weight.view(1, dim)])
        cosines, sines = cosines.unsqueeze(2), sines.unsqueeze(2)
        rotated = normalized * (cosines * weight)
        swapped = sines * torch.cat([-weight[:, half:], weight[:, :half]], -1)
        rotated[..., :half].addcmul_(normalized[..., half:], swapped[..., :half])
        rotated[..., half:].addcmul_(normalized[..., :half], swapped[..., half:])
        # The heads of a group share its key, and form one long list of queries.
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
        """Return the gradients of `mixed` and of the two norm weights."""
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


def gated(context: Tensor, gates: Tensor | None) -> Tensor:
    """Multiply attention's output `[..., heads * dim]` by the sigmoid of its gates, if it has any."""
    return context if gates is None else context * torch.sigmoid(gates.float()).to(context.dtype)


class FastSelfAttention(SelfAttention):
    """`SelfAttention` with a short forward pass for causal sequences, packed or not."""

    @property
    def head_layout(self) -> HeadLayout:
        groups = self.num_query_groups_per_partition
        heads_per_group = self.num_attention_heads_per_partition // groups
        return HeadLayout(groups, heads_per_group, self.hidden_size_per_attention_head)

    @property
    def softmax_scale(self) -> float:
        scale: float | None = self.config.softmax_scale
        return self.hidden_size_per_attention_head**-0.5 if scale is None else scale

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        known = key_value_states is None and inference_context is None and isinstance(rotary_pos_emb, Tensor)
        if not known or not self._can_shorten(rotary_pos_emb, others):
            return super().forward(
                hidden_states,
                attention_mask,
                key_value_states=key_value_states,
                inference_context=inference_context,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **others,
            )
        mixed, gates = self.split_gates(self.linear_qkv(hidden_states)[0])
        sequence = mixed.size(0)
        require_causal(attention_mask, sequence, sequence)
        # With images each token has its own angles. Otherwise every sequence begins with the first angles.
        tree = tree_of(packed_seq_params)
        own_angles = self.config.mrope_section is not None or tree is not None
        cosines, sines = cosines_and_sines(rotary_pos_emb, mixed.dtype, of_microbatch=own_angles)
        if packed_seq_params is None:
            return self.linear_proj(gated(self._attend(mixed, cosines, sines), gates))
        if tree is not None:
            query, key, value = (tensor.squeeze(1) for tensor in self._heads(mixed, cosines, sines))
            attend = partial(causal_attention, scale=self.softmax_scale)
            context = tree_attention(attend, query, key, value, tree).unsqueeze(1)
            return self.linear_proj(gated(context, gates))
        lengths = packed_lengths(packed_seq_params, sequence)
        if worth_padding(lengths):
            batch = PaddedBatch.of(lengths)
            if own_angles:
                cosines, sines = batch.pad(cosines.squeeze(1)), batch.pad(sines.squeeze(1))
            context = batch.unpad(self._attend(batch.pad(mixed.squeeze(1)), cosines, sines)).unsqueeze(1)
        elif own_angles:
            parts = zip(mixed.split(lengths), cosines.split(lengths), sines.split(lengths), strict=True)
            context = torch.cat([self._attend(*part) for part in parts])
        else:
            context = torch.cat([self._attend(part, cosines, sines) for part in mixed.split(lengths)])
        return self.linear_proj(gated(context, gates))

    def split_gates(self, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries, keys and values without the output gates, and the gates `[..., heads * dim]` or None."""
        if not self.config.attention_output_gate:
            return mixed, None
        layout = self.head_layout
        heads = mixed.unflatten(-1, (layout.groups, 2 * layout.heads_per_group + 2, layout.dim))
        queries, gates, keys_and_values = heads.split([layout.heads_per_group, layout.heads_per_group, 2], dim=-2)
        return torch.cat([queries, keys_and_values], dim=-2).flatten(-3), gates.flatten(-3)

    def _can_shorten(self, angles: Tensor, others: dict[str, Any]) -> bool:
        known_angles = angles.shape[2] == 1 and angles.shape[3] <= self.hidden_size_per_attention_head
        recomputed = self.checkpoint_core_attention and self.training
        return known_angles and not recomputed and all(value is None for value in others.values())

    def _attend(self, mixed: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Attend with mixed queries, keys and values `[sequence, batch, ...]`.

        Cosines and sines of positions from `sequence` on are ignored.
        """
        sequence = len(mixed)
        layout, scale = self.head_layout, self.softmax_scale
        cosines, sines = cosines[:sequence], sines[:sequence]
        norms = self.q_layernorm, self.k_layernorm
        is_fused = all(isinstance(norm, RMSNorm) for norm in norms) and cosines.shape[-1] == layout.dim
        if is_fused and mixed.dtype == torch.float32 and sequence <= LONGEST_SEQUENCE:
            weights = (norm.factors for norm in norms)
            return FusedAttentionFunction.apply(mixed, *weights, cosines, sines, norms[0].eps, scale, layout)
        return causal_attention(*self._heads(mixed, cosines, sines), scale)

    def _heads(self, mixed: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised and rotated queries and keys, and values, `[sequence, batch, heads or groups, dim]`."""
        sequence, batch, _ = mixed.shape
        layout, norms = self.head_layout, (self.q_layernorm, self.k_layernorm)
        heads = mixed.view(sequence, batch, layout.groups, layout.heads_per_group + 2, layout.dim)
        query, key, value = heads.split([layout.heads_per_group, 1, 1], dim=3)
        query = query.reshape(sequence, batch, -1, layout.dim)
        key, value = key.squeeze(3), value.squeeze(3)
        if norms[0] is not None:
            query = norms[0](query)
        if norms[1] is not None:
            key = norms[1](key)
        query, key = (RotaryFunction.apply(tensor, cosines, sines) for tensor in (query, key))
        return query, key, value

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Self attention without what training on one CPU never uses; parameters and results are Megatron-Core's."""

from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu_layers.attention import causal_attention, require_causal
from nemo_rl_moe.models.megatron.cpu_layers.fused_attention import (
    LONGEST_SEQUENCE,
    FusedAttentionFunction,
    HeadLayout,
)
from nemo_rl_moe.models.megatron.cpu_layers.norm import RMSNorm
from nemo_rl_moe.models.megatron.cpu_layers.packing import PaddedBatch, packed_lengths, worth_padding
from nemo_rl_moe.models.megatron.cpu_layers.rope import RotaryFunction, cosines_and_sines

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention


class FastSelfAttention(SelfAttention):
    """`SelfAttention` with a short forward pass for causal sequences, packed or not.

    Whatever that pass does not know (inference contexts, cross attention, recomputed core attention) goes through the
    stock one.
    """

    @property
    def has_own_norms(self) -> bool:
        """Whether queries and keys are normalised by this project's norm, as cached and fused attention want it."""
        return isinstance(self.q_layernorm, RMSNorm) and isinstance(self.k_layernorm, RMSNorm)

    @property
    def head_layout(self) -> HeadLayout:
        """This rank's heads."""
        groups = self.num_query_groups_per_partition
        heads_per_group = self.num_attention_heads_per_partition // groups
        return HeadLayout(groups, heads_per_group, self.hidden_size_per_attention_head)

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
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
        """Attends over `[sequence, batch, hidden]`.

        Returns:
            `[sequence, batch, hidden]`, and the output projection's bias.
        """
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
        mixed, _ = self.linear_qkv(hidden_states)
        sequence = mixed.size(0)
        require_causal(attention_mask, sequence, sequence)
        if packed_seq_params is None:
            return self.linear_proj(self._attend(mixed, rotary_pos_emb))
        lengths = packed_lengths(packed_seq_params, sequence)
        if worth_padding(lengths):
            batch = PaddedBatch.of(lengths)
            context = batch.unpad(self._attend(batch.pad(mixed.squeeze(1)), rotary_pos_emb)).unsqueeze(1)
        else:
            context = torch.cat([self._attend(part, rotary_pos_emb) for part in mixed.split(lengths)])
        return self.linear_proj(context)

    def _can_shorten(self, angles: Tensor, others: dict[str, Any]) -> bool:
        full_rotation = angles.shape[1:] == (1, 1, self.hidden_size_per_attention_head)
        recomputed = self.checkpoint_core_attention and self.training
        return full_rotation and not recomputed and all(value is None for value in others.values())

    def _attend(self, mixed: Tensor, angles: Tensor) -> Tensor:
        """Context of mixed queries, keys and values `[sequence, batch, ...]`, each sequence from position 0."""
        sequence, batch, _ = mixed.shape
        layout, scale = self.head_layout, self.softmax_scale
        cosines, sines = (tensor[:sequence] for tensor in cosines_and_sines(angles, mixed.dtype))
        norms = self.q_layernorm, self.k_layernorm
        if self.has_own_norms and mixed.dtype == torch.float32 and sequence <= LONGEST_SEQUENCE:
            weights = (norm.weight for norm in norms)
            return FusedAttentionFunction.apply(mixed, *weights, cosines, sines, norms[0].eps, scale, layout)
        heads = mixed.view(sequence, batch, layout.groups, layout.heads_per_group + 2, layout.dim)
        query, key, value = heads.split([layout.heads_per_group, 1, 1], dim=3)
        query = query.reshape(sequence, batch, -1, layout.dim)
        key, value = key.squeeze(3), value.squeeze(3)
        if norms[0] is not None:
            query = norms[0](query)
        if norms[1] is not None:
            key = norms[1](key)
        query, key = (RotaryFunction.apply(tensor, cosines, sines) for tensor in (query, key))
        return causal_attention(query, key, value, scale)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Latent attention in evaluation with a cache of keys and values, each computed from its latent once."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import SDPAttention
from nemo_rl_moe.models.megatron.cpu.cached_attention import PaddedInferenceContext, attend_to_cache
from nemo_rl_moe.models.megatron.cpu.cached_indexer import IndexerCache
from nemo_rl_moe.models.megatron.cpu.functions import RMSNorm, rotate
from nemo_rl_moe.models.megatron.layers.latent_attention import LatentSelfAttention
from nemo_rl_moe.models.megatron.layers.sparse_attention import SparseSelfAttention

Apply = Callable[[Tensor], Tensor]


def has_cached_latents(attention: LatentSelfAttention) -> bool:
    """Return whether `LatentAttentionCache` supports the modules of an attention."""
    norms = [module for name, module in attention.named_children() if name in ("q_layernorm", "kv_layernorm")]
    return isinstance(attention.core_attention, SDPAttention) and all(isinstance(norm, RMSNorm) for norm in norms)


class LatentAttentionCache:
    """Cache of the keys and values of a layer with latent attention, and attention to them.

    Args:
        apply: Function that turns a linear layer into a function of the layer's inputs.
    """

    def __init__(
        self,
        attention: LatentSelfAttention,
        context: PaddedInferenceContext,
        apply: Callable[[torch.nn.Module], Apply],
    ):
        config = attention.config
        self._context, self._scale = context, attention.softmax_scale
        self._latent, self._unrotated = config.kv_lora_rank, config.qk_head_dim
        self._rotated = config.qk_pos_emb_head_dim
        self._heads, self._value = attention.num_attention_heads_per_partition, config.v_head_dim
        self._query_latent, self._queries = _query_functions(attention, apply)
        self._indexer: IndexerCache | None = None
        is_sparse = isinstance(attention, SparseSelfAttention)
        if is_sparse and (context.max_sequence_length > attention.topk or attention.seen is not None):
            self._indexer = IndexerCache(attention, context)
        self._down, self._up = apply(attention.linear_kv_down_proj), apply(attention.linear_kv_up_proj)
        self._norm = attention.kv_layernorm
        rows, slots = context.max_batch_size, context.max_sequence_length
        like = attention.kv_layernorm.weight
        self._keys: Float[Tensor, "rows heads slots dim"] = like.new_empty(
            rows, self._heads, slots, self._unrotated + self._rotated
        )
        self._values: Float[Tensor, "rows heads slots value_dim"] = like.new_empty(
            rows, self._heads, slots, self._value
        )

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Select sequences by row index. The rotation stays, because all layers share it."""
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        if self._indexer is not None:
            self._indexer.select_rows(rows)

    def attend(self, inputs: Float[Tensor, "queries rows hidden"]) -> Float[Tensor, "queries rows heads_value_dim"]:
        """Cache keys and values of the next tokens, and return the attention to the full cache.

        Requires an empty cache if each row has several tokens.
        """
        queries, rows, _ = inputs.shape
        first = self._context.sequence_len_offset
        last = first + queries
        latent_of_queries = self._query_latent(inputs)
        query = self._queries(latent_of_queries).view(queries, rows, self._heads, self._unrotated + self._rotated)
        query[..., self._unrotated :] = self._rotate(query[..., self._unrotated :], slice(first, last))
        latent, rotated_key = self._down(inputs).split([self._latent, self._rotated], -1)
        made = self._up(self._norm(latent)).view(queries, rows, self._heads, self._unrotated + self._value)
        # [queries, rows, heads, ...] to [rows, heads, queries, ...]
        order = (1, 2, 0, 3)
        self._keys[:, :, first:last, : self._unrotated] = made[..., : self._unrotated].permute(order)
        self._keys[:, :, first:last, self._unrotated :] = self._rotate(
            rotated_key.unsqueeze(2), slice(first, last)
        ).permute(order)
        self._values[:, :, first:last] = made[..., self._unrotated :].permute(order)
        keys, values = self._keys[:, :, :last], self._values[:, :, :last]
        choice = None if self._indexer is None else self._indexer.choose(inputs, latent_of_queries)
        return attend_to_cache(query.unsqueeze(3), keys, values, self._context, self._scale, choice)

    def _rotate(self, heads: Float[Tensor, "queries rows heads dim"], slots: slice) -> Tensor:
        """Apply rotary embedding to pairs of neighbouring entries. Return all first, then all second entries."""
        rotation = self._context.rotation
        halves = torch.cat([heads[..., 0::2], heads[..., 1::2]], -1)
        return rotate(halves, rotation.cosines[slots].squeeze(2), rotation.sines[slots].squeeze(2))


def _query_functions(attention: LatentSelfAttention, apply: Callable[[Any], Apply]) -> tuple[Apply, Apply]:
    """Return the functions that compute the latent of queries, and queries. Some models have no such latent."""
    if attention.config.q_lora_rank is None:
        return lambda inputs: inputs, apply(attention.linear_q_proj)
    down, norm = apply(attention.linear_q_down_proj), attention.q_layernorm
    return lambda inputs: norm(down(inputs)), apply(attention.linear_q_up_proj)

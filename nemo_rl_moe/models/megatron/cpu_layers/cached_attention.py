# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with a key-value cache in evaluation: keys are kept after their rotation, prompts may have padding before.

Megatron-Core keeps keys as they are and rotates all of them at every token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu_layers.attention import causal_mask
from nemo_rl_moe.models.megatron.cpu_layers.fused_attention import HeadLayout
from nemo_rl_moe.models.megatron.cpu_layers.norm import rms_normalize

# isort: split
from megatron.core.inference.contexts import StaticInferenceContext


@dataclass
class LayerCache:
    """What one attention layer keeps.

    Attributes:
        keys_and_values: Keys normalised and rotated, values as they come.
        cosines: Of the rotary angles, times the weights of the norms of the query heads and of the key.
        sines: The same with the other half of the weights, the first half negative.
    """

    keys_and_values: Float[Tensor, "rows groups 2 slots dim"]
    cosines: Float[Tensor, "slots 1 1 heads dim"]
    sines: Float[Tensor, "slots 1 1 heads dim"]

    def keep_rows(self, rows: Int[Tensor, " kept"]) -> None:
        """Lets all other rows leave."""
        self.keys_and_values = self.keys_and_values.index_select(0, rows)


class PaddedInferenceContext(StaticInferenceContext):
    """A key-value cache for `CachedForward` whose rows may begin with padding.

    Rotary embedding is relative, so that padding before a row shifts its positions and changes nothing else.

    Args:
        num_rows: Sequences.
        num_slots: Tokens of each, padding included.
        num_pads: Padding before each; None where there is none.
    """

    def __init__(self, num_rows: int, num_slots: int, num_pads: Int[Tensor, " rows"] | None = None):
        super().__init__(num_rows, num_slots)
        self._hidden_slots = None
        if num_pads is not None:
            self._hidden_slots = torch.arange(num_slots, device=num_pads.device) < num_pads[:, None, None, None]
        self._mask: tuple[tuple[int, int], Tensor] | None = None

    def keep_rows(self, rows: Int[Tensor, " kept"]) -> None:
        """Lets all other rows leave."""
        for cache in self.key_value_memory_dict.values():
            cache.keep_rows(rows)
        if self._hidden_slots is not None:
            self._hidden_slots = self._hidden_slots.index_select(0, rows)
        self._mask = None

    def added_mask(self, queries: int, dtype: torch.dtype) -> Float[Tensor, "rows 1 queries keys"] | None:
        """What is added to the scores of the next `queries` slots: minus infinity for padding and for later slots.

        Args:
            queries: How many there are.
            dtype: Of the scores.

        Returns:
            None where there is no padding.
        """
        if self._hidden_slots is None:
            return None
        first = self.sequence_len_offset
        if self._mask is None or self._mask[0] != (first, queries):
            keys = first + queries
            hidden = self._hidden_slots[..., :keys]
            if queries > 1:
                # Padding itself must look at something: of no keys at all the softmax is not a number.
                hidden = hidden & ~self._hidden_slots[..., first:keys].transpose(2, 3)
                hidden = hidden | ~causal_mask(queries, keys, hidden.device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            # The same for all layers.
            self._mask = ((first, queries), mask)
        return self._mask[1]


def new_layer_cache(
    context: PaddedInferenceContext,
    angles: Float[Tensor, "slots 1 1 dim"],
    query_weight: Float[Tensor, " dim"],
    key_weight: Float[Tensor, " dim"],
    layout: HeadLayout,
) -> LayerCache:
    """An empty cache of one layer.

    Args:
        context: Gives the sizes.
        angles: Rotary angles of all slots.
        query_weight: Of the RMS norm of each query head.
        key_weight: Of that of the keys.
        layout: The layer's heads.
    """
    half = layout.dim // 2
    shape = (context.max_batch_size, layout.groups, 2, context.max_sequence_length, layout.dim)
    weight = torch.cat([query_weight.expand(layout.heads_per_group, layout.dim), key_weight.view(1, layout.dim)])
    swapped = torch.cat([-weight[:, half:], weight[:, :half]], -1)
    angles = angles.view(-1, 1, 1, 1, layout.dim)
    return LayerCache(
        keys_and_values=weight.new_empty(shape),
        cosines=angles.cos() * weight,
        sines=angles.sin() * swapped,
    )


def cached_attention(
    mixed: Float[Tensor, "queries rows mixed"],
    cache: LayerCache,
    context: PaddedInferenceContext,
    layout: HeadLayout,
    eps: float,
    scale: float,
) -> Float[Tensor, "queries rows heads_dim"]:
    """Normalises and rotates new queries and keys, puts keys and values into the cache, and attends to all of it.

    Args:
        mixed: Queries, keys and values, as Megatron-Core mixes them; overwritten. Of one slot or, when the cache is
            still empty, of the first few.
        cache: The layer's.
        context: Says which slots these are.
        layout: How `mixed` is laid out.
        eps: Of the norms of queries and keys.
        scale: Factor of the scores.
    """
    queries, rows, _ = mixed.shape
    groups, heads, dim = layout.groups, layout.heads_per_group, layout.dim
    first = context.sequence_len_offset
    last = first + queries
    split = mixed.view(queries, rows, groups, heads + 2, dim)
    queries_and_keys = split[..., : heads + 1, :]
    normalized = rms_normalize(queries_and_keys, eps)
    cosines, sines = cache.cosines[first:last], cache.sines[first:last]
    torch.addcmul(normalized * cosines, normalized.roll(dim // 2, -1), sines, out=queries_and_keys)
    cache.keys_and_values[:, :, :, first:last] = split[..., heads:, :].permute(1, 2, 3, 0, 4)
    keys, values = cache.keys_and_values[:, :, :, :last].unbind(2)
    mask = context.added_mask(queries, mixed.dtype)
    if queries == 1:
        # The heads of a group share its keys: together they are a list of queries.
        query = split[0, :, :, :heads]
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        return attended.reshape(1, rows, groups * heads * dim)
    query = split[..., :heads, :].reshape(queries, rows, groups * heads, dim).permute(1, 2, 0, 3)
    attended = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads > 1
    )
    return attended.permute(2, 0, 1, 3).reshape(queries, rows, groups * heads * dim)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with a key-value cache in evaluation. Prompts may be left-padded.

Keys are cached after rotation. Megatron-Core caches unrotated keys, and rotates all of them at every token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import causal_mask
from nemo_rl_moe.models.megatron.cpu.functions import RMSNorm, rms_normalize
from nemo_rl_moe.models.megatron.cpu.fused_attention import FastSelfAttention, HeadLayout


class Rotation:
    """Cosines and sines of a batch's rotary angles, shared by all layers.

    Args:
        factor: Factor by which cosines and sines are multiplied.

    Attributes:
        rotated: Number of a head's first entries that are rotated.
    """

    def __init__(self, angles: Float[Tensor, "slots rows_or_1 1 rotated"], head_dim: int, factor: float = 1.0):
        self.rotated = angles.shape[-1]
        # The other entries have angle 0.
        angles = F.pad(angles, (0, head_dim - self.rotated))[:, :, :, None]
        self.cosines: Float[Tensor, "slots rows_or_1 1 1 dim"] = angles.cos() * factor
        self.sines: Float[Tensor, "slots rows_or_1 1 1 dim"] = angles.sin() * factor

    @property
    def of_rows(self) -> bool:
        """Whether angles differ between rows."""
        return self.cosines.shape[1] > 1

    def swap_halves(self, heads: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Return the heads with the two halves of the rotated entries exchanged."""
        half, rotated = self.rotated // 2, self.rotated
        if rotated == heads.shape[-1]:
            return heads.roll(half, -1)
        return torch.cat([heads[..., half:rotated], heads[..., :half], heads[..., rotated:]], -1)

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Select the angles of sequences by row index. An index may occur several times."""
        if self.of_rows:
            self.cosines, self.sines = self.cosines.index_select(1, rows), self.sines.index_select(1, rows)


class PaddedInferenceContext(StaticInferenceContext):
    """A key-value cache for `CachedForward` with optional padding at the beginning of rows.

    Padding shifts a row's positions, which changes no result because rotary embedding is relative.

    Args:
        num_slots: Number of tokens of each row, including padding.
        num_pads: Number of padding tokens before each row, none by default.

    Attributes:
        num_pads: Number of padding tokens before each row. None: no row has padding.
        choice: Keys that the next tokens see by the last indexer, for layers without one. None: all keys.
    """

    choice: Bool[Tensor, "rows 1 queries keys"] | None = None

    def __init__(self, num_rows: int, num_slots: int, rotation: Rotation, num_pads: Int[Tensor, " rows"] | None = None):
        super().__init__(num_rows, num_slots)
        self.rotation = rotation
        self._hidden_slots = None
        self.num_pads = num_pads
        if num_pads is not None:
            self._hidden_slots = torch.arange(num_slots, device=num_pads.device) < num_pads[:, None, None, None]
        self._mask: tuple[tuple[int, int], Tensor] | None = None

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        self.rotation.select_rows(rows)
        for cache in self.key_value_memory_dict.values():
            cache.select_rows(rows)
        if self._hidden_slots is not None:
            assert self.num_pads is not None
            self._hidden_slots, self.num_pads = (
                tensor.index_select(0, rows) for tensor in (self._hidden_slots, self.num_pads)
            )
        self._mask = None

    def padding(self, queries: int) -> Bool[Tensor, "queries rows 1"] | None:
        """Return True for each of the next `queries` slots that is padding, or None if no slot is padding."""
        if self._hidden_slots is None or queries == 1:
            return None
        first = self.sequence_len_offset
        return self._hidden_slots[:, 0, 0, first : first + queries].t().unsqueeze(-1)

    def added_mask(self, queries: int, dtype: torch.dtype) -> Float[Tensor, "rows 1 queries keys"] | None:
        """Return an additive mask for the next slots: minus infinity for keys that are padding or later than a query.

        All layers share the mask. Returns None if no sequence has padding.
        """
        if self._hidden_slots is None:
            return None
        first = self.sequence_len_offset
        if self._mask is None or self._mask[0] != (first, queries):
            keys = first + queries
            hidden = self._hidden_slots[..., :keys]
            if queries > 1:
                # Padding sees padding: the softmax of no keys at all is not a number.
                hidden = hidden & ~self._hidden_slots[..., first:keys].transpose(2, 3)
                hidden = hidden | ~causal_mask(queries, keys, hidden.device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._mask = ((first, queries), mask)
        return self._mask[1]


def attend_to_cache(
    query: Float[Tensor, "queries rows groups heads dim"],
    keys: Float[Tensor, "rows groups keys dim"],
    values: Float[Tensor, "rows groups keys value_dim"],
    context: PaddedInferenceContext,
    scale: float,
    choice: Bool[Tensor, "rows 1 queries keys"] | None = None,
) -> Float[Tensor, "queries rows heads_value_dim"]:
    """Return the attention to the full cache. If there are several queries, the cache must hold nothing before them.

    Args:
        choice: True for the keys that a query sees. By default it sees all keys up to its own.
    """
    queries, rows, _, heads, _ = query.shape
    mask = context.added_mask(queries, query.dtype) if choice is None else choice
    if queries == 1:
        # The heads of a group share its keys, and form a list of queries.
        attended = F.scaled_dot_product_attention(query[0], keys, values, attn_mask=mask, scale=scale)
        return attended.reshape(1, rows, -1)
    attended = F.scaled_dot_product_attention(
        query.flatten(2, 3).permute(1, 2, 0, 3),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=heads > 1,
    )
    return attended.permute(2, 0, 1, 3).reshape(queries, rows, -1)


@dataclass(frozen=True)
class HeadNorm:
    """Norm of the query heads of a group and of its key.

    Attributes:
        normalize: Normalises without the factors `weight`. It may overwrite its input.
    """

    normalize: Callable[[Float[Tensor, "queries rows groups heads dim"]], Tensor]
    weight: Float[Tensor, "heads dim"]

    @classmethod
    def of_each_head(
        cls, query_weight: Float[Tensor, " dim"], key_weight: Float[Tensor, " dim"], eps: float, layout: HeadLayout
    ) -> "HeadNorm":
        weight = torch.cat([query_weight.expand(layout.heads_per_group, layout.dim), key_weight.view(1, layout.dim)])
        return cls(partial(rms_normalize, eps=eps), weight)

    @classmethod
    def of_attention(cls, attention: FastSelfAttention) -> "HeadNorm":
        layout, norms = attention.head_layout, (attention.q_layernorm, attention.k_layernorm)
        if isinstance(norms[0], RMSNorm) and isinstance(norms[1], RMSNorm):
            return cls.of_each_head(norms[0].factors, norms[1].factors, norms[0].eps, layout)
        weight = next(attention.linear_qkv.parameters())

        def by_modules(heads: Tensor) -> Tensor:
            for part, norm in zip((heads[..., :-1, :], heads[..., -1:, :]), norms, strict=True):
                if norm is not None and not isinstance(norm, IdentityOp):
                    part.copy_(norm(part.flatten(2, 3)).view_as(part))
            return heads

        return cls(by_modules, weight.new_ones(layout.heads_per_group + 1, layout.dim))


class SelfAttentionCache:
    """Cache of one layer's values and of its normalised and rotated keys, with the attention to them."""

    def __init__(self, context: PaddedInferenceContext, layout: HeadLayout, norm: HeadNorm, scale: float):
        self._context, self._layout, self._scale = context, layout, scale
        self._normalize, self._weight = norm.normalize, norm.weight
        # Weights with swapped halves, the first half negative.
        self._swapped = context.rotation.swap_halves(norm.weight).clone()
        self._swapped[..., : context.rotation.rotated // 2] *= -1
        shape = (context.max_batch_size, layout.groups, 2, context.max_sequence_length, layout.dim)
        self.keys_and_values: Float[Tensor, "rows groups 2 slots dim"] = norm.weight.new_empty(shape)
        # If rows differ, the products of all slots would take more memory than the keys and values.
        self._products = None if context.rotation.of_rows else self._products_of(slice(None))

    def _factors(self, slots: slice) -> tuple[Float[Tensor, "some rows_or_1 1 heads dim"], ...]:
        """Return cosines times the norms' weights, and sines times the weights with swapped halves."""
        if self._products is None:
            return self._products_of(slots)
        return tuple(product[slots] for product in self._products)

    def _products_of(self, slots: slice) -> tuple[Tensor, ...]:
        rotation = self._context.rotation
        return rotation.cosines[slots] * self._weight, rotation.sines[slots] * self._swapped

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Select sequences by row index. The rotation stays, because all layers share it."""
        self.keys_and_values = self.keys_and_values.index_select(0, rows)

    def attend(self, mixed: Float[Tensor, "queries rows mixed"]) -> Float[Tensor, "queries rows heads_dim"]:
        """Normalise and rotate new queries and keys, cache keys and values, and attend to the full cache.

        Args:
            mixed: Queries, keys and values in Megatron-Core's layout. They are overwritten. If each row has
                several queries, the cache must be empty.
        """
        queries, rows, _ = mixed.shape
        heads, first = self._layout.heads_per_group, self._context.sequence_len_offset
        last = first + queries
        split = mixed.view(queries, rows, self._layout.groups, heads + 2, self._layout.dim)
        queries_and_keys = split[..., : heads + 1, :]
        normalized = self._normalize(queries_and_keys)
        cosines, sines = self._factors(slice(first, last))
        swapped = self._context.rotation.swap_halves(normalized)
        torch.addcmul(normalized * cosines, swapped, sines, out=queries_and_keys)
        self.keys_and_values[:, :, :, first:last] = split[..., heads:, :].permute(1, 2, 3, 0, 4)
        keys, values = self.keys_and_values[:, :, :, :last].unbind(2)
        return attend_to_cache(split[..., :heads, :], keys, values, self._context, self._scale)

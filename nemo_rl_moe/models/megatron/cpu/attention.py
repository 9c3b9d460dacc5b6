# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Causal attention with torch's scaled dot product: one batch, packed sequences, masks and cached keys."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.training.prefix_tree import PrefixTree, tree_of

# If padding makes at most this many times as many rows, one call with all padded sequences is faster than separate
# calls.
_LARGEST_PADDED_SHARE = 1.5


def packed_lengths(packed: PackedSeqParams, total: int) -> list[int]:
    """Return the lengths of the packed sequences, including the padding of each sequence."""
    if packed.qkv_format != "thd":
        raise ValueError(f"packed sequences: qkv_format must be 'thd', got {packed.qkv_format!r}")
    padded = packed.cu_seqlens_q_padded
    on_host = getattr(packed, "bounds_on_host", None)  # otherwise the host waits for the device
    bounds = (packed.cu_seqlens_q if padded is None else padded).tolist() if on_host is None else on_host
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(f"packed sequences: cu_seqlens must run from 0 to {total}, got {bounds[0]} to {bounds[-1]}")
    return [end - start for start, end in itertools.pairwise(bounds) if end > start]


def worth_padding(lengths: list[int]) -> bool:
    """Return whether one padded batch of sequences of these lengths is faster than one call for each sequence."""
    return max(lengths) * len(lengths) <= _LARGEST_PADDED_SHARE * sum(lengths)


@dataclass(frozen=True)
class PaddedBatch:
    """Padded batch `[longest, sequences]` of packed sequences.

    Padding follows each sequence, so that causal attention of real tokens does not see it.

    Attributes:
        positions: `[tokens]`, index of each token in the flattened batch.
    """

    longest: int
    sequences: int
    positions: Tensor

    @classmethod
    def of(cls, lengths: list[int]) -> "PaddedBatch":
        # Cheap enough to repeat for every layer of a microbatch.
        positions = [torch.arange(length).mul_(len(lengths)).add_(index) for index, length in enumerate(lengths)]
        return cls(max(lengths), len(lengths), torch.cat(positions))

    def pad(self, packed: Tensor) -> Tensor:
        """Pad `[tokens, ...]` to `[longest, sequences, ...]` with zeros."""
        rows = packed.new_zeros(self.longest * self.sequences, *packed.shape[1:])
        return rows.index_copy(0, self.positions, packed).view(self.longest, self.sequences, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """Join `[longest, sequences, ...]` to `[tokens, ...]`."""
        return padded.flatten(0, 1).index_select(0, self.positions)


def causal_mask(queries: int, keys: int, device: torch.device | None = None, window: int | None = None) -> Tensor:
    """Return a mask `[queries, keys]`, True if a query sees a key. The last query belongs to the last key."""
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return allowed if window is None else allowed.triu_(keys - queries - window + 1)


def require_causal(attention_mask: Tensor | None, queries: int, keys: int) -> None:
    """Raise a ValueError unless the attention mask is causal or None, which means causal.

    Args:
        attention_mask: Megatron-Core's mask: True if a query must not see a key. It broadcasts to
            `[..., queries, keys]`.
    """
    if attention_mask is None:
        return
    allowed = causal_mask(queries, keys, attention_mask.device)
    if attention_mask.shape[-2:] != allowed.shape or not bool((attention_mask != allowed).all()):
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not the causal mask of {queries} queries and "
            f"{keys} keys; pass None, which means causal, or choose Megatron-Core's own layer spec for other masks"
        )


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Compute causal attention in Megatron's layout.

    With more keys than queries, the queries are the last positions, as in decoding with cached keys.

    Args:
        query: `[queries, batch, heads, dim]`.
        key: `[keys, batch, groups, dim]`, heads a multiple of groups.
        value: `[keys, batch, groups, value_dim]`.
        scale: Factor of the scores, `dim ** -0.5` by default.
        window: Number of keys that a query sees including its own, all by default.

    Returns:
        `[queries, batch, heads * value_dim]`.
    """
    queries, batch, heads, dim = query.shape
    width = heads * value.shape[-1]
    if queries == 1 and window is not None:
        key, value = key[-window:], value[-window:]
    keys, groups = key.shape[0], key.shape[2]
    if queries == 1:
        # The last position sees all keys, and the heads of one group can share a product.
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        query = query.reshape(batch, groups, heads // groups, dim)
        return F.scaled_dot_product_attention(query, key, value, scale=scale).reshape(1, batch, width)
    # torch aligns its causal mask to the first key, which is wrong with more keys than queries.
    plain = queries == keys and window is None
    mask = None if plain else causal_mask(queries, keys, query.device, window)
    return masked_attention(query, key, value, mask, scale).reshape(queries, batch, width)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Return the attention under a mask, `[queries, batch, heads, value_dim]`. Inputs are as in `causal_attention`.

    Args:
        mask: `[queries, keys]`, True if a query sees a key. None means causal, for as many keys as queries.
    """
    shares_keys = query.shape[2] != key.shape[2]
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shares_keys
    )
    return context.permute(2, 0, 1, 3)


def packed_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, lengths: list[int]
) -> Tensor:
    """Compute attention inside each sequence of a pack.

    Args:
        query: `[tokens, heads, dim]`.
        key: `[tokens, groups, dim]`.
        value: `[tokens, groups, value_dim]`.
        lengths: Lengths of the sequences, with sum `tokens`.

    Returns:
        `[tokens, heads * value_dim]`.
    """
    tensors = (query, key, value)
    if worth_padding(lengths):
        batch = PaddedBatch.of(lengths)
        query, key, value = (batch.pad(tensor) for tensor in tensors)
        return batch.unpad(attend(query, key, value))
    sequences = zip(*(tensor.unsqueeze(1).split(lengths) for tensor in tensors), strict=True)
    return torch.cat([attend(q, k, v) for q, k, v in sequences]).squeeze(1)


def tree_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree
) -> Tensor:
    """Compute attention of the tokens of a prefix tree to their paths from the root.

    The children of a node are one batch of queries over the keys of their path and their own keys, so no score is
    computed in vain except for padding.

    Args:
        query: `[tokens, heads, dim]`. Tokens after those of the tree are padding, and attend to each other.
        key: `[tokens, groups, dim]`.
        value: `[tokens, groups, value_dim]`.

    Returns:
        `[tokens, heads * value_dim]`.
    """
    found = []
    for path, children in tree.families():
        lengths = [tree.lengths[child] for child in children]
        own = slice(tree.starts[children[0]], tree.starts[children[-1]] + lengths[-1])
        parts = [tensor[own] for tensor in (query, key, value)]
        if not path:
            found.append(packed_attention(attend, parts[0], parts[1], parts[2], lengths))
            continue
        before = [torch.cat([tensor[part] for part in path]).unsqueeze(1) for tensor in (key, value)]
        batched = worth_padding(lengths)
        batch = PaddedBatch.of(lengths)
        queries, keys, values = (
            [batch.pad(part)] if batched else list(part.unsqueeze(1).split(lengths)) for part in parts
        )
        contexts = [
            attend(q, *(torch.cat([b.expand(-1, q.shape[1], -1, -1), o]) for b, o in zip(before, (k, v), strict=True)))
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        found.append(batch.unpad(contexts[0]) if batched else torch.cat(contexts).squeeze(1))
    if padding := query.shape[0] - tree.num_tokens:
        parts = [tensor[-padding:].unsqueeze(1) for tensor in (query, key, value)]
        found.append(attend(*parts).squeeze(1))
    return torch.cat(found)


class SDPAttention(MegatronModule):
    """Core attention for Megatron-Core's `SelfAttention` and `MLASelfAttention`: causal only, no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        softmax_scale: float | None = None,
        **_others: Any,
    ):
        super().__init__(config=config)
        _require_causal_type(attn_mask_type)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend to full sequences or, with `packed_seq_params`, inside each sequence of a pack."""
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported here; choose Megatron-Core's own layer spec")
        queries, keys = query.shape[0], key.shape[0]
        if queries > 1:
            # A single query sees all keys, and Megatron's type for it is "no mask".
            _require_causal_type(attn_mask_type)
        require_causal(attention_mask, queries, keys)
        if (tree := tree_of(packed_seq_params)) is not None:
            return tree_attention(self.attend, query, key, value, tree)
        if packed_seq_params is not None:
            lengths = packed_lengths(packed_seq_params, queries)
            return packed_attention(self.attend, query, key, value, lengths)
        return self.attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value, self.softmax_scale)


def _require_causal_type(attn_mask_type: AttnMaskType | None) -> None:
    if attn_mask_type not in (None, AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ValueError(f"only causal attention is supported here, got attn_mask_type {attn_mask_type}")

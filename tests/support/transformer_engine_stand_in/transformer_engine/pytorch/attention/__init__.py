# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences of one length (`sbhd`) or of many in a row (`thd`), which ranks may share, and a split.

A rank that shares sequences holds two of the chunks of each, one from either half, and attends to all keys.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from transformer_engine.pytorch.distributed import gather_rows
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, new_parameter


def positions_of_rank(length: int, rank: int, size: int) -> Tensor:
    """Return the positions of one sequence that a rank holds: of `2 size` chunks the one of its number from either
    end.
    """
    chunk, rest = divmod(length, 2 * size)
    if rest:
        raise AssertionError("Sequence length does not meet divisible requirements!")
    first = torch.arange(rank * chunk, (rank + 1) * chunk)
    return torch.cat([first, first + (2 * (size - rank) - 1) * chunk])


def gather_sequences(part: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the whole sequences, one behind the other on the first axis; gradients of all ranks add up on the one
    that holds.
    """
    size = group.size()
    gathered = gather_rows(part, group).unflatten(0, (size, -1))
    whole = part.new_empty((sum(lengths), *part.shape[1:]))
    begin = 0
    for length in lengths:
        here = slice(begin // size, (begin + length) // size)
        for rank in range(size):
            positions = begin + positions_of_rank(length, rank, size).to(part.device)
            whole = whole.index_copy(0, positions, gathered[rank, here])
        begin += length
    return whole


_MASKS = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right")


class DotProductAttention(TransformerEngineBaseModule):
    """Attention of this rank's heads; grouped queries, sinks, windows, and keys that are longer than values.

    Args:
        num_attention_heads: Of the whole layer.
        kv_channels: Numbers a head, or of keys and of values.
        num_gqa_groups: Heads of keys and values of the whole layer.
        softmax_type: `vanilla`, or `learnable` with `softmax_offset`, a logit that takes part and is then left out.
        window_size: How many tokens to the left and to the right are seen; -1: all.
        cp_group: Ranks that share each sequence, each with two of its chunks; keys and values go from rank to rank.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        cp_group: ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ):
        super().__init__()
        self.cp_group = cp_group if cp_group is not None and cp_group.size() > 1 else None
        if self.cp_group is not None and (cp_comm_type != "p2p" or softmax_type != "vanilla"):
            raise NotImplementedError("sinks, and other ways for keys and values to travel")
        if attention_dropout or attention_type != "self" or softmax_type not in ("vanilla", "learnable"):
            raise NotImplementedError("no dropout, no cross-attention")
        self.num_heads = num_attention_heads // tp_size
        self.num_groups = (num_gqa_groups or num_attention_heads) // tp_size
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = (
            kv_channels if isinstance(kv_channels, tuple) else (kv_channels,) * 2
        )
        self.scale = (
            softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(self.hidden_size_per_attention_head_k)
        )
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.softmax_offset: nn.Parameter | None = None
        if softmax_type == "learnable":
            # In float32 whatever the model's format is, and without a mark of tensor parallelism.
            self.softmax_offset = new_parameter(
                self.num_heads,
                dtype=torch.float32,
                device=torch.cuda.current_device(),
                init_method=nn.init.zeros_,
                get_rng_state_tracker=get_rng_state_tracker,
                rng_tracker_name=None,
            )

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention of each query; the heads of the result lie on one axis.

        Args:
            query_layer: `[sequence, batch, heads, size]`, or `[tokens, heads, size]` with `thd`.
            key_layer: The same with the heads of keys.
            value_layer: The same with the values' size.
            cu_seqlens_q: For `thd`: ends of the sequences, `[sequences + 1]`, int32.
            cu_seqlens_q_padded: Where they begin, if there is padding between them.
        """
        form, mask = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        if mask not in _MASKS or any(kwargs.values()):
            raise NotImplementedError(f"mask {mask}, {sorted(name for name, value in kwargs.items() if value)}")
        if len({tensor.dtype for tensor in (query_layer, key_layer, value_layer)}) != 1:
            raise AssertionError("Queries, keys and values must have the same data type!")
        if any(tensor.stride(-1) != 1 for tensor in (query_layer, key_layer, value_layer)):
            raise AssertionError("q, k and v must have stride 1 in their last dimension!")
        if (key_layer.shape[-2:], value_layer.shape[-2:]) != (
            (self.num_groups, self.hidden_size_per_attention_head_k),
            (self.num_groups, self.hidden_size_per_attention_head_v),
        ):
            raise AssertionError("Keys and values have wrong head_dim or number of gqa groups!")
        window = window_size or self.window_size
        if self.cp_group is not None and window not in (None, (-1, 0), (-1, -1)):
            raise AssertionError("The context parallel running configs cannot support sliding window attention!")
        if form == "sbhd":
            if "padding" in mask:
                raise NotImplementedError("padding masks of sbhd")
            positions = None
            if self.cp_group is not None:
                length = len(query_layer) * self.cp_group.size()
                positions = positions_of_rank(length, self.cp_group.rank(), self.cp_group.size())
                key_layer, value_layer = (
                    gather_sequences(t, [length], self.cp_group) for t in (key_layer, value_layer)
                )
            of_batch = [t.transpose(0, 1) for t in (query_layer, key_layer, value_layer)]
            found = self._one(*of_batch, mask, window, positions).transpose(0, 1)
        else:
            ends = cu_seqlens_q, cu_seqlens_kv
            found = self._many(query_layer, key_layer, value_layer, mask, window, ends, cu_seqlens_q_padded)
            if max_seqlen_q is None or max_seqlen_kv is None:
                raise AssertionError("max_seqlen is read from the device, which waits for it")
        return found.flatten(-2).contiguous()

    def _many(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: str,
        window: tuple[int, int] | None,
        ends_of_both: tuple[Tensor | None, Tensor | None],
        starts: Tensor | None,
    ) -> Tensor:
        if "padding" not in mask:
            raise AssertionError("Attention mask type must be padding or padding_causal for qkv_format=thd!")
        ends, ends_of_keys = ends_of_both
        if ends is None or ends_of_keys is None or {ends.dtype, ends_of_keys.dtype} != {torch.int32}:
            raise AssertionError("cu_seqlens_q and cu_seqlens_q must both be in dtype torch.int32!")
        if mask == "padding_causal_bottom_right":
            if self.cp_group is not None or starts is not None:
                raise NotImplementedError("queries of fewer tokens than keys, with padding or shared by ranks")
            pieces = zip(
                query.split(ends.diff().tolist()),
                *(tensor.split(ends_of_keys.diff().tolist()) for tensor in (key, value)),
                strict=True,
            )
            return torch.cat([self._one(q[None], k[None], v[None], mask[8:], window, None)[0] for q, k, v in pieces])
        lengths = ends.diff().tolist()
        begins, size = (ends if starts is None else starts).tolist(), 1
        if self.cp_group is not None:
            size = self.cp_group.size()
            if begins != ends.tolist():
                raise NotImplementedError("padding between sequences that ranks share")
            key, value = (gather_sequences(t, lengths, self.cp_group) for t in (key, value))
        found = query.new_zeros((*query.shape[:-1], self.hidden_size_per_attention_head_v))
        for begin, length in zip(begins, lengths, strict=False):
            rows, held = slice(begin, begin + length), slice(begin // size, (begin + length) // size)
            positions = None if self.cp_group is None else positions_of_rank(length, self.cp_group.rank(), size)
            parts = query[None, held], key[None, rows], value[None, rows]
            found[held] = self._one(*parts, mask.removeprefix("padding_"), window, positions)[0]
        return found

    def _one(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: str,
        window: tuple[int, int] | None,
        positions: Tensor | None,
    ) -> Tensor:
        """`[batch, sequence, heads, size]`; of queries at these positions, or at all."""
        shared = self.num_heads // self.num_groups
        key, value = (tensor.repeat_interleave(shared, dim=2) for tensor in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query.float(), key.float()) * self.scale
        queries, keys = scores.shape[-2:]
        ahead = keys - queries if mask == "causal_bottom_right" else 0
        positions = torch.arange(queries, device=query.device) if positions is None else positions.to(query.device)
        offset = torch.arange(keys, device=query.device)[None, :] - positions[:, None] - ahead
        left, right = window or (-1, -1)
        hidden = offset > 0 if "causal" in mask else torch.zeros_like(offset, dtype=torch.bool)
        hidden = hidden | (offset > right if right >= 0 else False) | (offset < -left if left >= 0 else False)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value.float()).to(query.dtype)


class _SplitAlongDim:
    """Pieces of a tensor; in Transformer Engine their gradients lie side by side in memory."""

    @staticmethod
    def apply(mixed: Tensor, dimension: int, sizes: Any, squeeze: bool = False) -> tuple[Tensor, ...]:
        pieces = torch.split(mixed, sizes, dim=dimension)
        return tuple(piece.squeeze(dimension) for piece in pieces) if squeeze else pieces

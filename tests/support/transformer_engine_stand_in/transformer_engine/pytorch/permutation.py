# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens into the order of experts and back, without a copy to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor


def _destinations(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """For each permuted row the token and the expert; experts one after the other."""
    expert, token = routing_map.bool().t().nonzero(as_tuple=True)
    return token, expert


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the permuted rows, their probabilities, and what brings them back.

    Args:
        inp: `[tokens, hidden]`.
        probs: `[tokens, experts]`.
        routing_map: `[tokens, experts]`, with ones or True for chosen experts.
        num_out_tokens: Number of permuted rows; kernels need it beforehand.
    """
    if num_out_tokens is None or num_out_tokens <= 0:
        raise AssertionError("permute: num_out_tokens must be positive")
    if not inp.is_contiguous():
        raise AssertionError("permute: rows must be contiguous")
    token, expert = _destinations(routing_map)
    if len(token) != num_out_tokens:
        raise AssertionError(f"permute: got {num_out_tokens} rows for {len(token)} choices")
    chosen = None if probs is None else probs[token, expert]
    return inp.index_select(0, token), chosen, torch.stack([token, expert])


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Return the same without probabilities."""
    if map_type != "mask":
        raise NotImplementedError(map_type)
    permuted, _, back = moe_permute_with_probs(inp, None, routing_map, num_out_tokens)
    return permuted, back


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """`[tokens, hidden]`: the sum of each token's rows, weighed by `merging_probs` `[tokens, experts]`."""
    if map_type != "mask" or pad_offsets is not None:
        raise NotImplementedError("padding of experts, which 8-bit formats need")
    token, expert = row_id_map
    weighed = inp if merging_probs is None else inp * merging_probs[token, expert, None]
    return inp.new_zeros(restore_shape).index_add(0, token, weighed.to(inp.dtype))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor | None, split_sizes: Tensor | Sequence[int], sorted_index: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the chunks of rows, of the given sizes, in another order."""
    sizes = split_sizes.tolist() if isinstance(split_sizes, Tensor) else list(split_sizes)
    order = sorted_index.tolist()
    rows = torch.cat([inp.split(sizes)[index] for index in order])
    return rows, None if probs is None else torch.cat([probs.split(sizes)[index] for index in order])


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Return the same without probabilities."""
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]

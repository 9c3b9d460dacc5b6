# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in one kernel."""

import itertools

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import positions_of_rank


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Turn the first numbers of every head, as many as there are frequencies.

    Args:
        t: `[sequence, batch, heads, size]`, or with format `thd` `[tokens, heads, size]`.
        freqs: Angles in float32, `[positions, 1, 1, turned]`.
        cu_seqlens: For `thd`: where sequences begin, `[sequences + 1]`, int32; positions begin anew with each.
        cp_size: For `thd`: ranks that share each sequence, of which `t` is the part of one; `cu_seqlens` is of all.
        cp_rank: That one.
    """
    if not fused or start_positions is not None or interleaved:
        raise NotImplementedError("Megatron-Core calls for none of it here")
    if freqs.dtype != torch.float32:
        raise AssertionError("Dtype of the freqs tensor must be float32.")
    if tensor_format == "sbhd":
        if cu_seqlens is not None or t.dim() != 4:
            raise AssertionError("sbhd: four axes and no cu_seqlens")
        angles = freqs[: t.shape[0]]
    else:
        if cu_seqlens is None or cu_seqlens.dtype != torch.int32 or t.dim() != 3:
            raise AssertionError("thd: three axes and cu_seqlens in int32")
        starts = cu_seqlens.tolist()
        lengths = [end - begin for begin, end in itertools.pairwise(starts)]
        positions = [positions_of_rank(n, cp_rank, cp_size) if cp_size > 1 else torch.arange(n) for n in lengths]
        angles = freqs[torch.cat(positions).to(freqs.device)].squeeze(1)
        if len(angles) != len(t):
            raise AssertionError(f"cu_seqlens end at {len(angles)}, with {len(t)} tokens")
    turned = freqs.shape[-1]
    head, rest = t[..., :turned].float(), t[..., turned:]
    first, second = head.chunk(2, -1)
    found = head * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([found.to(t.dtype), rest], -1)

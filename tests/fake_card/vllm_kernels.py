# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's own kernels on the fake card: the host computes their results in torch, in float32.

These are the operations of its C++ extensions and the kernels of Triton that Qwen3-MoE needs in bfloat16. Any other
fails with its name.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.fake_card import host_kernels

TRITON = "vLLM's Triton"


def vocab_parallel_embedding(out: Tensor, input_ids: Tensor, weight: Tensor, first: int, end: int, *_: int) -> None:
    """Write the rows of tokens that this rank has, and zeros for all others."""
    has_row = (input_ids >= first) & (input_ids < end)
    out.copy_(weight[(input_ids - first).where(has_row, 0).long()] * has_row[:, None])


def rms_norm(result: Tensor, given: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Write the normed rows."""
    normed = given.float() * (given.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    normed = normed.to(given.dtype)
    result.copy_(normed if weight is None else normed * weight)


def fused_add_rms_norm(given: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Add to the residual, in place, and write its normed rows."""
    residual.add_(given)
    rms_norm(given, residual, weight, epsilon)


def silu_and_mul(result: Tensor, given: Tensor) -> None:
    """Write the product of the second half with SiLU of the first."""
    gate, up = given.float().chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate queries and keys in place."""
    if not is_neox or rope_dim_offset or inverse:
        raise NotImplementedError("the fake card rotates halves of a head alone")
    cos, sin = cos_sin_cache[positions.flatten()].float().chunk(2, dim=-1)
    for rotated in (query, key):
        if rotated is None:
            continue
        heads = rotated.view(len(cos), -1, head_size)
        first, second = heads[..., : 2 * cos.shape[-1]].float().chunk(2, dim=-1)
        turned = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
        heads[..., : 2 * cos.shape[-1]] = torch.cat(turned, dim=-1).to(heads.dtype)


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *_: Any
) -> None:
    """Write keys and values of tokens into their slots of the paged caches, of which -1 is none."""
    slots = slot_mapping.flatten()
    tokens = (slots >= 0).nonzero().flatten()
    size = key_cache.shape[1]
    for cache, given in ((key_cache, key), (value_cache, value)):
        cache[slots[tokens] // size, slots[tokens] % size] = given[tokens].to(cache.dtype)


def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    q_v: Tensor | None,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    page_table: Tensor,
    *others: Any,
) -> list[Tensor]:
    """Return causal attention of tokens to their sequences in a paged cache, by FlashAttention 3's operation."""
    softmax_scale, is_causal = others[8], others[9]
    if page_table is None or not is_causal:
        raise NotImplementedError("the fake card attends causally to a paged cache alone")
    out = torch.empty_like(q) if out is None else out
    bounds, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    size, repeats = k.shape[1], q.shape[1] // k.shape[2]
    for sequence, length in enumerate(lengths):
        begin, end = bounds[sequence], bounds[sequence + 1]
        if end == begin:
            continue
        pages = page_table[sequence, : -(-length // size)]
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(repeats, dim=1) for cache in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * softmax_scale
        seen = torch.arange(length) <= torch.arange(length - (end - begin), length)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    log_sums = torch.zeros(q.shape[1], len(q))
    return [out, log_sums, log_sums, log_sums]


def no_schedule(*_: Any) -> Tensor:
    """Return what FlashAttention 3 plans ahead: nothing."""
    return torch.zeros(1, dtype=torch.int32)


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool,
    bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> None:
    """Write the likeliest experts of each token, and their probabilities."""
    if bias is not None:
        raise NotImplementedError("the fake card chooses experts without a bias alone")
    weights, indices = gating_output.float().softmax(-1).topk(topk_weights.shape[-1], dim=-1)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    topk_indices.copy_(indices)


def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    expert_map: Tensor | None = None,
    scatter_idx: Tensor | None = None,
) -> None:
    """Write the pairs of tokens and experts in blocks of one expert each, which is -1 if another rank has it."""
    if scatter_idx is not None:
        raise NotImplementedError("the fake card does not write the order of pairs")
    chosen = topk_ids.flatten().tolist()
    here = range(num_experts) if expert_map is None else expert_map.tolist()
    pairs, experts = [], []
    for expert in range(num_experts):
        of_expert = [pair for pair, each in enumerate(chosen) if each == expert]
        num_blocks = -(-len(of_expert) // block_size)
        pairs += of_expert + [len(chosen)] * (num_blocks * block_size - len(of_expert))
        experts += [here[expert]] * num_blocks
    sorted_token_ids.fill_(len(chosen))
    sorted_token_ids[: len(pairs)] = torch.tensor(pairs, dtype=sorted_token_ids.dtype)
    experts_ids.fill_(-1)
    experts_ids[: len(experts)] = torch.tensor(experts, dtype=experts_ids.dtype)
    num_tokens_post_pad.fill_(len(pairs))


def moe_sum(given: Tensor, output: Tensor, *_: Any) -> None:
    """Write the sum of a token's experts."""
    output.copy_(given.float().sum(1))


def fused_moe(
    given: Tensor,
    weights: Tensor,
    result: Tensor,
    bias: Tensor | None,
    scale_of_given: Tensor | None,
    scale_of_weights: Tensor | None,
    topk_weights: Tensor | None,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *_: Any,
    MUL_ROUTED_WEIGHT: bool,
    top_k: int,
    BLOCK_SIZE_M: int,
    **options: Any,
) -> None:
    """Write the product of each token with the matrix of each of its experts."""
    num_pairs = len(given) * top_k
    if sorted_token_ids is None:
        pairs, experts = torch.arange(num_pairs), expert_ids[:num_pairs].long()
    else:
        used = int(num_tokens_post_padded)
        pairs, experts = sorted_token_ids[:used].long(), expert_ids.long().repeat_interleave(BLOCK_SIZE_M)[:used]
        pairs, experts = pairs[pairs < num_pairs], experts[pairs < num_pairs]
    rows = result.view(num_pairs, -1)
    for expert in experts.unique().tolist():
        chosen = pairs[experts == expert]
        if expert < 0:
            rows[chosen] = 0
            continue
        product = given[chosen // top_k].float() @ weights[expert].float().T
        if bias is not None:
            product += bias[expert]
        if MUL_ROUTED_WEIGHT:
            assert topk_weights is not None
            product *= topk_weights.flatten()[chosen, None]
        rows[chosen] = product.to(rows.dtype)


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: Tensor,
    positions_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    slot_mapping_ptr: Tensor,
    *,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    PAD_ID: int,
    num_programs: int,
    **options: Any,
) -> None:
    """Write the slot of each token in the paged cache, by the blocks of its request."""
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError("the fake card maps slots of one rank alone")
    slot_mapping_ptr[num_tokens:max_num_tokens] = PAD_ID
    bounds = query_start_loc_ptr[:num_programs].tolist()
    for request, (begin, end) in enumerate(pairwise(bounds)):
        positions = positions_ptr[begin:end].long()
        blocks = block_table_ptr[request, positions // KV_CACHE_BLOCK_SIZE].long()
        slot_mapping_ptr[begin:end] = blocks * KV_CACHE_BLOCK_SIZE + positions % KV_CACHE_BLOCK_SIZE


host_kernels.KERNELS |= {
    "_C": {
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "silu_and_mul": silu_and_mul,
        "rotary_embedding": rotary_embedding,
        "vocab_parallel_embedding": vocab_parallel_embedding,
    },
    "_C_cache_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
    "_vllm_fa2_C": {},
    "_vllm_fa3_C": {"fwd": flash_attention_3, "get_scheduler_metadata": no_schedule},
    "_moe_C": {
        "topk_softmax": topk_softmax,
        "moe_align_block_size": moe_align_block_size,
        "moe_sum": moe_sum,
    },
    TRITON: {"fused_moe_kernel": fused_moe, "ComputeSlotMappingKernel.kernel": slot_mapping},
}

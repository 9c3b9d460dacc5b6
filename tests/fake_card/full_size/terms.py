# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The terms of `plan`, and which lines of a step allocate what each of them stands for."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from tests.fake_card.full_size.history import Block

OTHER = "other"
_STATISTICS_BYTES = 2 << 20
"""Norms and attention allocate their output and its statistics in one line. Those of 8,192 tokens are smaller."""

# Beginning of a line, as `file.py:function`; beginning of a line further out; term. The first that fits a block is its.
_LINES = (
    ("gemm.py:get_cublas_workspace", "", "workspaces"),
    ("distrib_optimizer.py:copy_group_grads", "", "copied_gradients"),
    ("", "chunked_head.py:", "head"),
    ("_common.py:apply_normalization", "multi_latent_attention.py:", "latents"),
    ("_common.py:apply_normalization", "", "norms"),
    ("", "attention.py:get_query_key_value_tensors", "query_key_norms"),
    ("rope.py:forward", "", "attention"),
    ("utils.py:get_qkv_layout", "", "attention"),
    ("kernels.py:fused_attn_fwd", "", "attention"),
    ("rope_utils.py:", "multi_latent_attention.py:", "angles"),
    ("gemm.py:general_gemm", "multi_latent_attention.py:_qkv_down_projection", "latents"),
    ("base.py:prepare_forward", "multi_latent_attention.py:", "latents"),
    ("", "multi_latent_attention.py:qkv_up_proj_and_rope_apply", "attention"),
    ("", "multi_latent_attention.py:_prepare_mla_core_attention_value", "attention"),
    ("multi_latent_attention.py:forward", "", "attention"),  # the output without padding
    ("gemm.py:general_gemm", "mlp.py:forward", "matrices"),
    ("fused_bias_swiglu.py:", "mlp.py:forward", "matrices"),
    ("rmsnorm.py:op_forward", "transformer_layer.py:", "norms"),
    ("rmsnorm.py:op_forward", "", "head"),
    ("fused_bias_dropout.py:", "transformer_layer.py:_forward_attention", "residual"),
    ("fused_bias_dropout.py:", "transformer_layer.py:_forward_post_mlp", "input"),
    ("", "language_model_embedding.py:forward", "input"),
    ("permutation.py:make_row_id_map", "", "routing"),
    ("moe_utils.py:topk_routing_with_score_function", "", "routing"),
    ("", "moe_utils.py:_compute_topk", "routing"),
)
_WITH_STATISTICS = ("norms", "latents", "query_key_norms", "attention")


def sums_by_term(blocks: Iterable[Block], known: Mapping[str, Collection[int]]) -> Counter[str]:
    """Return the bytes of each term.

    Args:
        known: Term -> addresses of its allocations, for what is held between steps.
    """
    term_of = {address: term for term, addresses in known.items() for address in addresses}
    found: Counter[str] = Counter()
    for block in blocks:
        found[term_of.get(block.address) or term_of_lines(block)] += block.size
    return found


def term_of_lines(block: Block) -> str:
    """Return the term that the lines of a block belong to, or `OTHER`."""
    for inner, outer, term in _LINES:
        if block.lines and block.lines[0].startswith(inner) and any(line.startswith(outer) for line in block.lines):
            return "statistics" if term in _WITH_STATISTICS and block.size < _STATISTICS_BYTES else term
    return OTHER

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models with gated delta nets that vLLM's build for CPUs can compute."""

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
_FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    # The smallest sizes that the kernel takes.
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # As behind the rule stands a norm of numbers that can be near 0.
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_OF_IMAGES = {**_ROPE, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_FIELDS, **_EXPERTS, "norm_topk_prob": True, "rope_parameters": _ROPE},
    "qwen3_5_moe_text": {**_FIELDS, **_EXPERTS, "rope_parameters": _OF_IMAGES},
    "qwen3_5_text": {**_FIELDS, "intermediate_size": 48, "rope_parameters": _OF_IMAGES},
}
# As the tiny tokenizer has them.
OF_THE_TOKENIZER = {"vocab_size": 45, "eos_token_id": 1, "pad_token_id": 0}

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A dense model as small as the one with experts."""

from typing import Any

from transformers import Qwen3Config


def tiny_dense_hf_config(**changes: Any) -> Qwen3Config:
    """Four layers, grouped-query attention, a vocabulary of 64."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 64,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    return Qwen3Config(**{**fields, **changes})

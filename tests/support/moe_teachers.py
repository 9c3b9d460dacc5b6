# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of teachers with the policy's tokenizer, which prefer some tokens whatever came before."""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM


def make_moe_teacher(folder: Path, policy: Path, seed: int = 3, **changes: int) -> Path:
    """Write a model of the policy's shape with weights of its own.

    Args:
        changes: Fields of its configuration.
    """
    fields = json.loads((policy / "config.json").read_text()) | changes
    config = Qwen3MoeConfig(**fields | {"dtype": "float32", "tie_word_embeddings": False})
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        # A direction that all embeddings share: some tokens are likely whatever came before.
        model.model.embed_tokens.weight += 0.1 * torch.randn(config.hidden_size)
        model.lm_head.weight *= 4
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder

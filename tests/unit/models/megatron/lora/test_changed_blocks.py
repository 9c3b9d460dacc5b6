# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that an engine with the base gets again, and what that leaves out of a large model."""

import pytest
import torch

from nemo_rl_moe.models.megatron.lora.changes import block_of
from tests.conftest import REPOSITORY_ROOT


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.self_attn"),
        ("model.language_model.layers.3.linear_attn.in_proj_qkv.weight", "model.language_model.layers.3.linear_attn"),
        ("model.layers.12.mlp.experts.7.up_proj.weight", "model.layers.12.mlp"),
        ("model.layers.12.mlp.experts.gate_up_proj", "model.layers.12.mlp"),
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.block_sparse_moe"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_block_of_a_tensor(name: str, block: str) -> None:
    assert block_of(name) == block


def test_later_refits_of_qwen3_30b_a3b() -> None:
    """With adapters on the attention alone they are 3% of the weights, with all linear layers 98%."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(REPOSITORY_ROOT / "examples/assets/model_configs/Qwen3-30B-A3B")
    with torch.device("meta"):
        sizes = {name: 2 * each.numel() for name, each in AutoModelForCausalLM.from_config(config).named_parameters()}
    attention = sum(size for name, size in sizes.items() if block_of(name).endswith(".self_attn"))
    layers = attention + sum(size for name, size in sizes.items() if block_of(name).endswith(".mlp"))
    in_gigabytes = [round(size / 1e9, 1) for size in (sum(sizes.values()), attention, layers)]
    assert in_gigabytes == [61.1, 1.8, 59.8]

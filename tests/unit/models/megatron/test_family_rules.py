# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""How parameters are put together from Hugging Face tensors, on hand-worked values."""

import torch

from nemo_rl_moe.models.families import softmax_moe as qwen3_moe
from tests.support.tiny_model import tiny_hf_config


def test_query_key_value_are_grouped_by_key_head() -> None:
    hf_config = tiny_hf_config()
    # Each row holds its own head: queries 0 to 3, keys 10 and 11, values 20 and 21.
    parts = {
        "q": torch.arange(4).repeat_interleave(8),
        "k": torch.arange(10, 12).repeat_interleave(8),
        "v": torch.arange(20, 22).repeat_interleave(8),
    }
    read = {f"model.layers.1.self_attn.{key}_proj.weight": rows[:, None].float() for key, rows in parts.items()}
    rule = qwen3_moe.QWEN3_MOE.rules.find("decoder.layers.1.self_attention.linear_qkv.weight")
    assert rule is not None
    joined = rule.layout.join([read[source.name] for source in rule.sources], hf_config)
    assert joined.view(8, 8).float().mean(1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    parts = rule.layout.split(joined, 3, hf_config)
    back = {source.name: part for source, part in zip(rule.sources, parts, strict=True)}
    assert all(torch.equal(back[key], rows) for key, rows in read.items())

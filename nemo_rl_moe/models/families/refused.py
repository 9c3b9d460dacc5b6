# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Unsupported Mixture-of-Experts families: the missing features, and the nearest supported family."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedFamily:
    """An unsupported family.

    Attributes:
        why: Missing features, in words that follow "it needs".
        nearest: `model_type` of the supported family with the most similar routers or attention.
    """

    name: str
    why: str
    nearest: str


_ERNIE = RefusedFamily(
    "Ernie-4.5",
    "an expert bias on softmax scores, which Megatron-Core refuses, and interleaved rotation",
    "deepseek_v3",
)
_GRANITE = RefusedFamily(
    "Granite",
    "multipliers of embeddings, residuals, attention scores and logits, which Megatron-Core lacks",
    "mixtral",
)
_LLAMA4 = RefusedFamily(
    "Llama 4", "attention in chunks, layers without rotation, and scores that scale an expert's input", "qwen3_moe"
)
REFUSED: Mapping[str, RefusedFamily] = {
    "ernie4_5_moe": _ERNIE,
    "ernie4_5_vl_moe": _ERNIE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": RefusedFamily(
        "Hunyuan",
        "norms of queries and keys after the rotation, and layers with different numbers of experts",
        "qwen3_moe",
    ),
    "jamba": RefusedFamily("Jamba", "Mamba-1 layers, which Megatron-Core lacks", "mixtral"),
    "lfm2_moe": RefusedFamily("LFM2", "short convolutions, which Megatron-Core lacks", "minimax_m2"),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "nemotron_h": RefusedFamily(
        "Nemotron-3",
        "Mamba-2 layers, for which there is no module without mamba_ssm, and experts without a gate",
        "glm4_moe",
    ),
    "phimoe": RefusedFamily("Phi-3.5-MoE", "a router with a gradient of its own (SparseMixer)", "mixtral"),
}
"""`model_type` -> unsupported family."""

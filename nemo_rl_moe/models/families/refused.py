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


_ARIA = RefusedFamily("Aria", "a mapping of its fields and transposed experts, and another vision tower", "mixtral")
_AUDIO_AND_SPEECH = RefusedFamily("Qwen3-Omni", "encoders of audio and video, and a decoder of speech", "qwen3_vl_moe")
_DEEPSEEK_OCR = RefusedFamily(
    "DeepSeek-OCR",
    "a vision tower of two encoders, and attention without latents next to DeepSeek-V2's experts",
    "deepseek_v2",
)
_DELTA_ATTENTION = RefusedFamily(
    "Kimi-Linear and Ling-3", "Kimi delta attention, whose decay differs by channel, in most layers", "deepseek_v3"
)
_DOTS3 = RefusedFamily(
    "dots3",
    "latent attention with output gates, latents and heads of other sizes in layers with sliding windows",
    "deepseek_v32",
)
_ENCODER_DECODER = RefusedFamily(
    "encoder-decoder",
    "an encoder, attention to its outputs, and experts that drop tokens above their capacity",
    "mixtral",
)
_ERNIE = RefusedFamily(
    "Ernie-4.5",
    "an expert bias on softmax scores, which Megatron-Core refuses, and interleaved rotation",
    "deepseek_v3",
)
_GEMMA4 = RefusedFamily(
    "Gemma 4",
    "norms after each sublayer, experts added to a dense MLP, and a scale for each expert",
    "qwen3_moe",
)
_GLM4V = RefusedFamily("GLM-4.5V", "another vision tower, and positions in three dimensions", "glm4_moe")
_GLM5_NEXT = RefusedFamily(
    "GLM-5-Next", "hyper-connections, Kimi delta attention, and an indexer over pooled keys", "glm_moe_dsa"
)
_GRANITE = RefusedFamily(
    "Granite",
    "multipliers of embeddings, residuals, attention scores and logits, which Megatron-Core lacks",
    "mixtral",
)
_HEADS_BY_LAYER = RefusedFamily(
    "Laguna and Step-3.5", "numbers of heads that differ by layer, gated attention, and sliding windows", "glm4_moe"
)
_HUNYUAN4 = RefusedFamily(
    "Hunyuan-4", "hyper-connections, and sparse attention with output gates and sinks", "glm_moe_dsa"
)
_INKLING = RefusedFamily(
    "Inkling", "relative positions instead of rotation, and short convolutions in each layer", "glm4_moe"
)
_LLAMA4 = RefusedFamily(
    "Llama 4", "attention in chunks, layers without rotation, and scores that scale an expert's input", "qwen3_moe"
)
_MINIMAX_M3 = RefusedFamily(
    "MiniMax-M3", "sparse attention to blocks, and clamped SwiGLU with shared experts", "minimax_m2"
)
_MISTRAL_LARGE4 = RefusedFamily(
    "Mistral-Large-4",
    "learnt rotation frequencies, learnt scales of queries, and groups of experts by softmax scores",
    "glm_moe_dsa",
)
_MUSE_SPARK = RefusedFamily(
    "Muse-Spark", "experts in a latent space with norms of their outputs, and gated residuals", "minimax_m2"
)
_NEMOTRON = RefusedFamily(
    "Nemotron-3 with images or audio",
    "encoders of images, video or audio before Nemotron-3 Nano's decoder",
    "nemotron_h",
)
_QWEN4 = RefusedFamily(
    "Qwen4-Exp", "hyper-connections, an indexer, and embeddings of hashed n-grams", "qwen3_5_moe_text"
)
REFUSED: Mapping[str, RefusedFamily] = {
    "afmoe": RefusedFamily(
        "AFMoE", "gated attention, sliding windows, layers without rotation, and norms after each sublayer", "glm4_moe"
    ),
    "aria": _ARIA,
    "aria_text": _ARIA,
    "axk1": RefusedFamily("A.X-K1", "a norm of the output of each MoE layer", "deepseek_v3"),
    "axk2": RefusedFamily("A.X-K2", "norms with gates, and gated latent attention", "deepseek_v32"),
    "bailing_hybrid": _DELTA_ATTENTION,
    "beam": RefusedFamily(
        "Beam", "residuals scaled by depth, gated attention, sliding windows, and layers without rotation", "glm4_moe"
    ),
    "cohere2_moe": RefusedFamily(
        "Cohere2-MoE", "attention and experts in parallel, sliding windows, and layers without rotation", "mixtral"
    ),
    "dbrx": RefusedFamily("DBRX", "clamped queries, keys and values, and norms that subtract the mean", "mixtral"),
    "deepseek_ocr2": _DEEPSEEK_OCR,
    "deepseek_ocr2_text": _DEEPSEEK_OCR,
    "deepseek_v4": RefusedFamily(
        "DeepSeek-V4", "compressed sparse attention, hyper-connections, and routers that hash token ids", "deepseek_v32"
    ),
    "diffusion_gemma": _GEMMA4,
    "diffusion_gemma_text": _GEMMA4,
    "doge": RefusedFamily("Doge", "experts retrieved by product keys, and attention with learnt masks", "qwen3_moe"),
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "ernie4_5_moe": _ERNIE,
    "ernie4_5_vl_moe": _ERNIE,
    "ernie4_5_vl_moe_text": _ERNIE,
    "exaone_moe": RefusedFamily("K-EXAONE", "sliding windows, and layers without rotation", "glm4_moe"),
    "flex_olmo": RefusedFamily("FlexOlmo", "norms after attention and experts instead of before them", "olmoe"),
    "flint": RefusedFamily(
        "Flint",
        "attention sinks, sliding windows, layers without rotation, and sigmoid scores without bias",
        "qwen3_moe",
    ),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4v_moe": _GLM4V,
    "glm4v_moe_text": _GLM4V,
    "glm5_next": _GLM5_NEXT,
    "glm5_next_text": _GLM5_NEXT,
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": RefusedFamily(
        "Hunyuan",
        "norms of queries and keys after the rotation, and layers with different numbers of experts",
        "qwen3_moe",
    ),
    "hy_v3": RefusedFamily(
        "Hunyuan-3", "a mapping of its fields and tensors, and sums with shared experts in float32", "glm4_moe"
    ),
    "hy_v4": _HUNYUAN4,
    "hy_v4_vl": _HUNYUAN4,
    "hy_v4_vl_text": _HUNYUAN4,
    "inkling2": _INKLING,
    "inkling2_loop": _INKLING,
    "inkling2_loop_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling_mm_model": _INKLING,
    "inkling_text": _INKLING,
    "jamba": RefusedFamily("Jamba", "Mamba-1 layers, which Megatron-Core lacks", "mixtral"),
    "jetmoe": RefusedFamily("JetMoE", "attention whose projections of queries and outputs are experts", "mixtral"),
    "kimi_k25": RefusedFamily("Kimi-K2.5", "another vision tower before DeepSeek-V3's decoder", "kimi_k2"),
    "kimi_linear": _DELTA_ATTENTION,
    "kolibri1": RefusedFamily(
        "Kolibri", "norms after each sublayer, sliding windows, and an expert bias on logits", "glm4_moe"
    ),
    "laguna": _HEADS_BY_LAYER,
    "lara_mini": RefusedFamily(
        "Lara", "gated delta nets with sliding windows, and attention layers without rotation", "qwen3_next"
    ),
    "lfm2_moe": RefusedFamily("LFM2", "short convolutions, which Megatron-Core lacks", "minimax_m2"),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "longcat_flash": RefusedFamily(
        "LongCat-Flash", "two attentions and two dense MLPs in each layer, and experts without weights", "deepseek_v3"
    ),
    "mellum": RefusedFamily("Mellum", "sliding windows, and a rotation for each kind of layer", "qwen3_moe"),
    "mimo_v2_flash": RefusedFamily(
        "MiMo-V2-Flash", "sliding windows with sinks and more heads, and values of another size", "glm4_moe"
    ),
    "minimax": RefusedFamily("MiniMax-01", "lightning attention, and scaled residuals", "mixtral"),
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "mistral4": RefusedFamily(
        "Mistral 4", "queries scaled by position, and groups of experts by two softmax scores", "deepseek_v2"
    ),
    "mistral_large4": _MISTRAL_LARGE4,
    "mistral_large4_text": _MISTRAL_LARGE4,
    "muse_spark": _MUSE_SPARK,
    "muse_spark_text": _MUSE_SPARK,
    "nemo_speechlm": _NEMOTRON,
    "nemotron_h_omni": _NEMOTRON,
    "nllb-moe": _ENCODER_DECODER,
    "openai_privacy_filter": RefusedFamily(
        "Privacy Filter", "attention in both directions, and a head that classifies tokens", "gpt_oss"
    ),
    "phimoe": RefusedFamily("Phi-3.5-MoE", "a router with a gradient of its own (SparseMixer)", "mixtral"),
    "qwen3_omni_moe": _AUDIO_AND_SPEECH,
    "qwen3_omni_moe_talker_text": _AUDIO_AND_SPEECH,
    "qwen3_omni_moe_text": _AUDIO_AND_SPEECH,
    "qwen3_omni_moe_thinker": _AUDIO_AND_SPEECH,
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "sarvam_mla": RefusedFamily("Sarvam-105B", "a mapping of its fields; all modules are DeepSeek-V3's", "deepseek_v3"),
    "sarvam_moe": RefusedFamily("Sarvam-30B", "a mapping of its fields; all modules are GLM-4-MoE's", "glm4_moe"),
    "step3p5": _HEADS_BY_LAYER,
    "step3p7": _HEADS_BY_LAYER,
    "switch_transformers": _ENCODER_DECODER,
    "unlimited_ocr": _DEEPSEEK_OCR,
    "unlimited_ocr_text": _DEEPSEEK_OCR,
    "zaya": RefusedFamily(
        "ZAYA", "convolutions in attention, and routers that read the router of the layer before", "qwen3_moe"
    ),
}
"""`model_type` -> unsupported family."""

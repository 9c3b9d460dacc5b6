# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations of released models, as their `config.json` has them, and how large these models are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EVERYWHERE: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_QWEN: Mapping[str, Any] = {
    **_EVERYWHERE,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN2_MOE: Mapping[str, Any] = {
    **_QWEN,
    "architectures": ["Qwen2MoeForCausalLM"],
    "eos_token_id": 151643,
    "model_type": "qwen2_moe",
    "norm_topk_prob": False,
    "transformers_version": "4.39.0.dev0",
}
_QWEN3_MOE: Mapping[str, Any] = {
    **_QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.51.0",
}
_MIXTRAL: Mapping[str, Any] = {
    **_EVERYWHERE,
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.36.0.dev0",
    "vocab_size": 32000,
}


@dataclass(frozen=True)
class PublishedConfig:
    """One released model.

    Attributes:
        config_json: The file's content.
        num_parameters: Of the released weights.
    """

    config_json: Mapping[str, Any]
    num_parameters: int


PUBLISHED_CONFIGS: Mapping[str, PublishedConfig] = {
    "Llama-3.1-8B": PublishedConfig(
        {
            **_EVERYWHERE,
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "transformers_version": "4.43.0.dev0",
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "Mistral-7B-v0.3": PublishedConfig(
        {
            **_EVERYWHERE,
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "transformers_version": "4.42.0.dev0",
            "vocab_size": 32768,
        },
        7_248_023_552,
    ),
    "Mixtral-8x7B-v0.1": PublishedConfig(
        {
            **_MIXTRAL,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "router_aux_loss_coef": 0.02,
        },
        46_702_792_704,
    ),
    "Mixtral-8x22B-v0.1": PublishedConfig(
        {
            **_MIXTRAL,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "max_position_embeddings": 65536,
            "num_attention_heads": 48,
            "num_hidden_layers": 56,
            "router_aux_loss_coef": 0.001,
        },
        140_620_634_112,
    ),
    "OLMoE-1B-7B-0924": PublishedConfig(
        {
            **_EVERYWHERE,
            "architectures": ["OlmoeForCausalLM"],
            "attention_bias": False,
            "clip_qkv": None,
            "eos_token_id": 50279,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "max_position_embeddings": 4096,
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "output_router_logits": False,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "transformers_version": "4.43.0.dev0",
            "vocab_size": 50304,
        },
        6_919_161_856,
    ),
    "Qwen1.5-MoE-A2.7B": PublishedConfig(
        {
            **_QWEN2_MOE,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
        },
        14_315_784_192,
    ),
    "Qwen2-57B-A14B": PublishedConfig(
        {
            **_QWEN2_MOE,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "moe_intermediate_size": 2560,
            "num_attention_heads": 28,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "shared_expert_intermediate_size": 20480,
            "sliding_window": 131072,
        },
        57_408_658_944,
    ),
    "Qwen2.5-0.5B": PublishedConfig(
        {
            **_EVERYWHERE,
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "transformers_version": "4.40.1",
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        494_032_768,
    ),
    "Qwen3-30B-A3B": PublishedConfig(
        {
            **_QWEN3_MOE,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_window_layers": 48,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
        },
        30_532_122_624,
    ),
    "Qwen3-30B-A3B-Thinking-2507": PublishedConfig(
        {
            **_QWEN3_MOE,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "max_window_layers": 48,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "rope_theta": 10000000,
            "use_qk_norm": True,
        },
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": PublishedConfig(
        {
            **_QWEN3_MOE,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
        235_093_634_560,
    ),
}

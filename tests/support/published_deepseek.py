# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations of DeepSeek's released models and of Moonlight, as their `config.json` has them, and their sizes.

The biases by which V3 and Moonlight choose experts are not counted: no gradient moves them.
"""

from collections.abc import Mapping
from typing import Any

from tests.support.published_configs import PublishedConfig

_YARN: Mapping[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_EVERYWHERE: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
_V2: Mapping[str, Any] = {
    **_EVERYWHERE,
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "rms_norm_eps": 1e-06,
    "scoring_func": "softmax",
    "vocab_size": 102400,
}
_V3: Mapping[str, Any] = {
    **_EVERYWHERE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "model_type": "deepseek_v3",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
FP8: Mapping[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""What DeepSeek-V3's file says besides of its weights."""

DEEPSEEK_CONFIGS: Mapping[str, PublishedConfig] = {
    "DeepSeek-V2-Lite": PublishedConfig(
        {
            **_V2,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "greedy",
            "transformers_version": "4.33.1",
        },
        15_706_484_224,
    ),
    "DeepSeek-V2": PublishedConfig(
        {
            **_V2,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_group": 8,
            "n_routed_experts": 160,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_key_value_heads": 128,
            "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "transformers_version": "4.39.3",
        },
        235_741_434_880,
    ),
    # The main model: the layer that predicts a further token is not counted.
    "DeepSeek-V3": PublishedConfig(
        {
            **_V3,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": dict(_YARN),
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "transformers_version": "4.33.1",
            "vocab_size": 129280,
        },
        671_026_404_352,
    ),
    "Moonlight-16B-A3B": PublishedConfig(
        {
            **_V3,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "max_position_embeddings": 8192,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-05,
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
            "transformers_version": "4.46.3",
            "vocab_size": 163840,
        },
        15_960_108_544,
    ),
}

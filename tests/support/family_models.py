# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every supported family, one for each branch that a family's configuration takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.models.families import FAMILIES

_SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN_EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.01,
}
_DEEPSEEK: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2,
    "beta_slow": 0.5,
    "mscale": 0.8,
    "mscale_all_dim": 0.5,
}
_SHARED_EXPERT: Mapping[str, Any] = {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 24}
# An indexer that chooses all tokens of the tests' sequences.
_INDEXED: Mapping[str, Any] = {
    **_DEEPSEEK,
    "q_lora_rank": 10,
    "n_shared_experts": 1,
    "index_topk": 64,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "rope_parameters": _DEEPSEEK_YARN,
}
# An indexer that chooses among the tokens of the tests' sequences. With many heads, no two scores are 0.
_SPARSE: Mapping[str, Any] = {**_INDEXED, "index_topk": 4, "index_n_heads": 16}
# Stretched so far that short sequences show it.
_ROPE: Mapping[str, Mapping[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
    },
}


_GPT_OSS: Mapping[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "swiglu_limit": 1.0,
}
_GLM: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "attention_bias": True,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}


_DOTS: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


_DELTA_NETS: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    # Behind the rule stands a norm of numbers that can be near 0: with a small epsilon it makes rounding large.
    "rms_norm_eps": 1e-3,
}

_NEMOTRON: Mapping[str, Any] = {
    "layers_block_type": [
        *("linear_attention", "moe", "full_attention", "moe"),
        *("mlp", "linear_attention", "full_attention", "moe"),
    ],
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    # A norm of numbers that can be near 0 follows the recurrence.
    "layer_norm_epsilon": 1e-3,
}


@dataclass(frozen=True)
class FamilyModel:
    """One tiny model.

    Layers, heads, query groups and experts can be cut in two, so that every layout of the tests holds it.

    Attributes:
        model_type: As in `config.json`.
        fields: Of the configuration; those that all share are filled in.
        layers_together: Only each such number of layers can a stage of a pipeline begin.
    """

    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    layers_together: int = 1

    @property
    def router_fields(self) -> Mapping[str, str | None]:
        return FAMILIES[self.model_type].router_fields

    @property
    def num_layers(self) -> int:
        fields = {**_SIZES, **self.fields}
        return len(fields["layers_block_type"]) if "layers_block_type" in fields else int(fields["num_hidden_layers"])

    @property
    def experts_can_be_cut(self) -> bool:
        """Whether expert-tensor parallelism can split the experts: those of gpt-oss have biases."""
        return self.has_experts and self.model_type != "gpt_oss"

    @property
    def has_experts(self) -> bool:
        return "num_experts_per_tok" in self.fields

    def hf_config(self) -> Any:
        config = self.transformers_config()
        if config.model_type != self.model_type:
            config.model_type = self.model_type
        return config

    def transformers_config(self) -> Any:
        """Return the configuration of transformers' model, which may know the family as another one."""
        from transformers import AutoConfig

        known_type = FAMILIES[self.model_type].transformers_type or self.model_type
        return AutoConfig.for_model(known_type, **{**_SIZES, **self.fields})

    def config_json(self) -> dict[str, Any]:
        return {**self.transformers_config().to_dict(), "model_type": self.model_type}


FAMILY_MODELS: Mapping[str, FamilyModel] = {
    "llama": FamilyModel("llama", {}),
    "llama_linear_positions": FamilyModel("llama", {"rope_parameters": _ROPE["linear"], "tie_word_embeddings": True}),
    "llama3_positions": FamilyModel("llama", {"rope_parameters": _ROPE["llama3"], "head_dim": 16}),
    "mistral": FamilyModel("mistral", {"sliding_window": None, "head_dim": 16}),
    "mixtral": FamilyModel("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}),
    "mixtral_top3_odd_vocabulary": FamilyModel(
        "mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "intermediate_size": 16,
            "head_dim": 16,
            "vocab_size": 61,
            "router_aux_loss_coef": 0.0,
        },
    ),
    "olmoe": FamilyModel("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}),
    "olmoe_normalized_weights": FamilyModel(
        "olmoe",
        {
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    "qwen2": FamilyModel("qwen2", {}),
    "qwen2_yarn_positions": FamilyModel("qwen2", {"rope_parameters": _ROPE["yarn"], "tie_word_embeddings": True}),
    "qwen2_moe": FamilyModel("qwen2_moe", _SHARED_EXPERT),
    "qwen2_moe_dense_layers_normalized_weights": FamilyModel(
        "qwen2_moe", {**_SHARED_EXPERT, "mlp_only_layers": [0], "norm_topk_prob": True, "num_experts_per_tok": 3}
    ),
    "qwen2_moe_without_biases": FamilyModel("qwen2_moe", {**_SHARED_EXPERT, "qkv_bias": False}),
    "qwen3": FamilyModel("qwen3", {"head_dim": 16}),
    "qwen3_yarn_positions": FamilyModel("qwen3", {"head_dim": 8, "rope_parameters": _ROPE["yarn"]}),
    "qwen3_tied": FamilyModel("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "vocab_size": 61}),
    "qwen3_moe": FamilyModel("qwen3_moe", {**_QWEN_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_dense_layers_raw_weights": FamilyModel(
        "qwen3_moe",
        {**_QWEN_EXPERTS, "num_hidden_layers": 4, "head_dim": 8, "mlp_only_layers": [0, 3], "norm_topk_prob": False},
    ),
    "qwen3_moe_every_second_layer_tied": FamilyModel(
        "qwen3_moe",
        {
            **_QWEN_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "decoder_sparse_step": 2,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
            "vocab_size": 61,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    # As gpt-oss-20b; a window, a limit and positions so small that each of them shows.
    "gpt_oss": FamilyModel(
        "gpt_oss",
        {
            **_GPT_OSS,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
    ),
    "gpt_oss_other_windows_top3_odd_vocabulary": FamilyModel(
        "gpt_oss",
        {
            **_GPT_OSS,
            "num_experts_per_tok": 3,
            "sliding_window": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            "router_aux_loss_coef": 0.0,
            "vocab_size": 61,
        },
    ),
    # As DeepSeek-V2-Lite.
    "deepseek_v2": FamilyModel("deepseek_v2", {**_DEEPSEEK, "rope_parameters": _DEEPSEEK_YARN}),
    "deepseek_v2_groups": FamilyModel(
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 10,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 2.0,
            "rope_parameters": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3": FamilyModel(
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 10,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    # As Moonlight: another epsilon than that of the latents' norms, and no groups.
    "deepseek_v3_moonlight": FamilyModel(
        "deepseek_v3",
        {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-2, "routed_scaling_factor": 2.446},
    ),
    # As GLM-4.5-Air.
    "glm4_moe": FamilyModel("glm4_moe", _GLM),
    # As GLM-4.5, with norms, and with groups besides, positions stretched in the rotated part of heads.
    "glm4_moe_norms_groups": FamilyModel(
        "glm4_moe",
        {
            **_GLM,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                **_ROPE["yarn"],
                "partial_rotary_factor": 0.5,
                "attention_factor": 1.0,
            },
        },
    ),
    "glm4_moe_without_biases": FamilyModel("glm4_moe", {**_GLM, "attention_bias": False, "num_hidden_layers": 2}),
    # As dots.llm1.
    "dots1": FamilyModel("dots1", {**_DOTS, "first_k_dense_replace": 1, "sliding_window": None}),
    "solar_open": FamilyModel("solar_open", {**_DOTS, "rope_parameters": _ROPE["yarn"]}),
    # As GLM-4.7-Flash.
    "glm4_moe_lite": FamilyModel(
        "glm4_moe_lite",
        {
            **{name: value for name, value in _DEEPSEEK.items() if name != "first_k_dense_replace"},
            "q_lora_rank": 10,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "v_head_dim": 12,
        },
    ),
    "minimax_m2": FamilyModel(
        "minimax_m2",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 16,
            "num_experts_per_tok": 3,
            "intermediate_size": 12,
            "router_aux_loss_coef": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v32": FamilyModel("deepseek_v32", {**_INDEXED, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": FamilyModel(
        "glm_moe_dsa",
        {
            **_INDEXED,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "first_k_dense_replace": 2,
            "indexer_types": ["full", "full", "shared", "full"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "deepseek_v32_sparse": FamilyModel("deepseek_v32", {**_SPARSE, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa_sparse": FamilyModel(
        "glm_moe_dsa",
        {
            **_SPARSE,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "indexer_types": ["full", "shared"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        layers_together=2,
    ),
    "qwen3_next": FamilyModel(
        "qwen3_next",
        {
            **_DELTA_NETS,
            **_SHARED_EXPERT,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_next_dense_layers_raw_weights": FamilyModel(
        "qwen3_next",
        {
            **_DELTA_NETS,
            **_SHARED_EXPERT,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "vocab_size": 61,
        },
    ),
    "qwen3_5_moe_text": FamilyModel(
        "qwen3_5_moe_text",
        {
            **_DELTA_NETS,
            **_SHARED_EXPERT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [1, 1, 0],
            },
        },
    ),
    "qwen3_5_text": FamilyModel("qwen3_5_text", {**_DELTA_NETS, "tie_word_embeddings": True, "vocab_size": 61}),
    # As Nemotron-3 Nano, with each kind of layer in either half.
    "nemotron_h": FamilyModel("nemotron_h", _NEMOTRON),
    "nemotron_h_groups_odd_vocabulary": FamilyModel(
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
            "n_group": 4,
            "topk_group": 2,
            "mamba_num_heads": 2,
            "conv_kernel": 2,
            "vocab_size": 61,
        },
    ),
    # With YaRN's two bounds in one place, as released.
    "kimi_k2": FamilyModel(
        "kimi_k2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 10,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**_DEEPSEEK_YARN, "beta_fast": 1.0, "beta_slow": 1.0},
        },
    ),
}
"""By a name for people that begins with the model type."""

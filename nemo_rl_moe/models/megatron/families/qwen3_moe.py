# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: grouped-query attention with QK norm, RMSNorm, RoPE, SwiGLU experts, optional dense layers."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families.family import ModelFamily


def moe_layer_pattern(hf_config: Any) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    return [
        int(index not in (hf_config.mlp_only_layers or []) and (index + 1) % hf_config.decoder_sparse_step == 0)
        for index in range(hf_config.num_hidden_layers)
    ]


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields.

    Raises:
        ConfigurationError: The model uses something that is not supported.
    """
    unsupported = {
        "attention_bias": bool(hf_config.attention_bias),
        "use_sliding_window": bool(hf_config.use_sliding_window),
        "attention_dropout": hf_config.attention_dropout != 0.0,
        "hidden_act": hf_config.hidden_act != "silu",
        "rope_parameters.rope_type": hf_config.rope_parameters.get("rope_type", "default") != "default",
    }
    if problems := [name for name, used in unsupported.items() if used]:
        raise ConfigurationError([f"policy.model_name: config.json: {name} is not supported" for name in problems])
    coefficient = float(hf_config.router_aux_loss_coef or 0.0)
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.head_dim,
        "ffn_hidden_size": hf_config.intermediate_size,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "init_method_std": hf_config.initializer_range,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_layer_freq": moe_layer_pattern(hf_config),
        # Softmax over the chosen experts' logits equals softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "aux_loss" if coefficient > 0 else "none",
        "moe_aux_loss_coeff": coefficient,
        "moe_token_dispatcher_type": "alltoall",
    }


def rotary_base(hf_config: Any) -> float:
    """Base period of the rotary embedding."""
    return float(hf_config.rope_parameters["rope_theta"])


_TOP_LEVEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_IN_LAYER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.linear_fc([12])\.weight")
_QKV = "self_attention.linear_qkv.weight"
_DENSE_FC1 = "mlp.linear_fc1.weight"


def _hugging_face_names(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that one canonical parameter is made of, in the order in which they are joined."""
    if name in _TOP_LEVEL:
        return (_TOP_LEVEL[name],)
    layer, inner = _LAYER.fullmatch(name).groups()  # type: ignore[union-attr]
    prefix = f"model.layers.{layer}."
    if inner == _QKV:
        return tuple(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv")
    if inner == _DENSE_FC1:
        return (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
    if expert := _EXPERT.fullmatch(inner):
        expert_prefix = f"{prefix}mlp.experts.{expert.group(1)}."
        if expert.group(2) == "2":
            return (f"{expert_prefix}down_proj.weight",)
        return (f"{expert_prefix}gate_proj.weight", f"{expert_prefix}up_proj.weight")
    return (prefix + _IN_LAYER[inner],)


def _heads(hf_config: Any) -> tuple[int, int, int]:
    groups = hf_config.num_key_value_heads
    return groups, hf_config.num_attention_heads // groups, hf_config.head_dim


def to_hugging_face(name: str, tensor: Tensor, hf_config: Any) -> Mapping[str, Tensor]:
    """One full canonical parameter as the Hugging Face tensors that it holds."""
    names = _hugging_face_names(name)
    if name.endswith(_QKV):
        # Megatron keeps, for each query group, its query heads, then its key head, then its value head.
        groups, heads_per_group, head_dim = _heads(hf_config)
        grouped = tensor.view(groups, heads_per_group + 2, head_dim, -1)
        parts = grouped.split([heads_per_group, 1, 1], dim=1)
        return {key: part.reshape(-1, tensor.shape[-1]) for key, part in zip(names, parts, strict=True)}
    return dict(zip(names, tensor.chunk(len(names), dim=0), strict=True))


def from_hugging_face(name: str, read: Callable[[str], Tensor], hf_config: Any) -> Tensor:
    """One full canonical parameter, put together from Hugging Face tensors."""
    if name == "output_layer.weight" and hf_config.tie_word_embeddings:
        # The last pipeline stage's own copy.
        name = "embedding.word_embeddings.weight"
    parts = [read(key) for key in _hugging_face_names(name)]
    if name.endswith(_QKV):
        groups, _, head_dim = _heads(hf_config)
        grouped = [part.view(groups, -1, head_dim, part.shape[-1]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, parts[0].shape[-1])
    return torch.cat(parts, dim=0) if len(parts) > 1 else parts[0]


FAMILY = ModelFamily(transformer_fields, rotary_base, to_hugging_face, from_hugging_face)

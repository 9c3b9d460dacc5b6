# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the Qwen3 families share: grouped-query attention with QK norm, RMSNorm, RoPE, dense SwiGLU layers."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families.family import FromHuggingFace, ToHuggingFace

NamesInLayer = Callable[[str], tuple[str, ...]]
"""From a canonical name within a layer to the Hugging Face names that it is made of, within that layer."""


def common_transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields, but for the experts.

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
    }


def rotary_base(hf_config: Any) -> float:
    """Base period of the rotary embedding."""
    return float(hf_config.rope_parameters["rope_theta"])


_TOP_LEVEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_QKV = "self_attention.linear_qkv.weight"
_IN_LAYER = {
    _QKV: ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


def names_in_dense_layer(inner: str) -> tuple[str, ...]:
    """The Hugging Face tensors of one parameter of a layer without experts, in the order in which they are joined."""
    return _IN_LAYER[inner]


def tensor_rules(names_in_layer: NamesInLayer) -> tuple[ToHuggingFace, FromHuggingFace]:
    """The two directions of a family's tensors.

    Args:
        names_in_layer: The family's names in a layer.
    """

    def hugging_face_names(name: str) -> tuple[str, ...]:
        if name in _TOP_LEVEL:
            return (_TOP_LEVEL[name],)
        layer, inner = _LAYER.fullmatch(name).groups()  # type: ignore[union-attr]
        return tuple(f"model.layers.{layer}.{inner_name}" for inner_name in names_in_layer(inner))

    def to_hugging_face(name: str, tensor: Tensor, hf_config: Any) -> Mapping[str, Tensor]:
        """One full canonical parameter as the Hugging Face tensors that it holds."""
        names = hugging_face_names(name)
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
        parts = [read(key) for key in hugging_face_names(name)]
        if name.endswith(_QKV):
            groups, _, head_dim = _heads(hf_config)
            grouped = [part.view(groups, -1, head_dim, part.shape[-1]) for part in parts]
            return torch.cat(grouped, dim=1).reshape(-1, parts[0].shape[-1])
        return torch.cat(parts, dim=0) if len(parts) > 1 else parts[0]

    return to_hugging_face, from_hugging_face


def _heads(hf_config: Any) -> tuple[int, int, int]:
    groups = hf_config.num_key_value_heads
    return groups, hf_config.num_attention_heads // groups, hf_config.head_dim

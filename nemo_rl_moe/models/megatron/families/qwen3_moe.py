# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3's layers with SwiGLU experts in all or some of them."""

import re
from typing import Any

from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.qwen3_common import (
    common_transformer_fields,
    names_in_dense_layer,
    rotary_base,
    tensor_rules,
)

_ROUTER = {"mlp.router.weight": ("mlp.gate.weight",)}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.linear_fc([12])\.weight")
_EXPERT_LINEARS = {"1": ("gate_proj", "up_proj"), "2": ("down_proj",)}


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
    coefficient = float(hf_config.router_aux_loss_coef or 0.0)
    return common_transformer_fields(hf_config) | {
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


def names_in_layer(inner: str) -> tuple[str, ...]:
    """The Hugging Face tensors of one parameter of a layer, in the order in which they are joined."""
    if expert := _EXPERT.fullmatch(inner):
        index, linear = expert.groups()
        return tuple(f"mlp.experts.{index}.{part}.weight" for part in _EXPERT_LINEARS[linear])
    return _ROUTER.get(inner) or names_in_dense_layer(inner)


to_hugging_face, from_hugging_face = tensor_rules(names_in_layer)
FAMILY = ModelFamily(transformer_fields, rotary_base, to_hugging_face, from_hugging_face)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routers as in DeepSeek-V3, which many families have: sigmoid scores, an expert bias, groups of experts.

These families also have dense layers before the MoE layers, and layers of multi-token prediction.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import decoder
from nemo_rl_moe.models.families.rules import MtpTensors, Rule, field_names, rule

WHERE = "policy.model_name: config.json:"
READ_FIELDS = field_names(
    "first_k_dense_replace mlp_layer_types moe_intermediate_size n_group n_routed_experts n_shared_experts num_experts "
    "num_experts_per_tok num_local_experts routed_scaling_factor topk_group"
)
"""Fields of `config.json` that the functions of this file read."""
FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    # Megatron-Core always normalises sigmoid scores.
    "norm_topk_prob": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
# Multi-token prediction layers are kept, not computed.
WITHOUT_EFFECT = field_names("num_mtp_layers num_nextn_predict_layers")
EXPORTED_FIELDS: Mapping[str, Any] = dict.fromkeys(sorted(WITHOUT_EFFECT), 0)
ROUTER_FIELDS: Mapping[str, str | None] = {
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_score_function": None,
    "moe_router_pre_softmax": None,
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_dtype": None,
    "moe_router_load_balancing_type": None,
    "moe_aux_loss_coeff": None,
    "moe_router_enable_expert_bias": None,
    "moe_router_bias_update_rate": None,
}
"""`ModelFamily.router_fields` of families whose files have no auxiliary loss."""
EXPERT_BIAS: dict[str, Rule] = {
    f"{decoder.LAYER}mlp.router.expert_bias": rule(f"{decoder.HF_LAYER}mlp.gate.e_score_correction_bias")
}
SHARED_EXPERTS = decoder.swiglu("mlp.shared_experts", "mlp.shared_experts")


def score_fields(hf_config: Any, family: str) -> dict[str, Any]:
    """Return the TransformerConfig fields of routers with sigmoid scores and an expert bias."""
    if hf_config.num_experts_per_tok < 2:
        raise ConfigurationError(
            f"{WHERE} num_experts_per_tok: got {hf_config.num_experts_per_tok}, supported for {family}: 2 or more"
        )
    return {
        "moe_router_score_function": "sigmoid",
        # Has no effect on sigmoid scores.
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        # The bias is constant, as in the last phase of DeepSeek-V3's training (DeepSeek-AI 2024, 4.2).
        "moe_router_bias_update_rate": 0.0,
    }


def group_fields(hf_config: Any) -> dict[str, int | None]:
    """Return the TransformerConfig fields of expert groups. Their values are None if a token may use all groups."""
    groups, usable = hf_config.n_group, hf_config.topk_group
    limited = groups is not None and usable is not None and usable < groups
    if limited and usable * hf_config.n_routed_experts // groups < hf_config.num_experts_per_tok:
        raise ConfigurationError(
            f"{WHERE} num_experts_per_tok: got {hf_config.num_experts_per_tok}, more than the experts in the {usable} "
            f"of {groups} groups that a token may use"
        )
    return {"moe_router_num_groups": groups if limited else None, "moe_router_group_topk": usable if limited else None}


def layer_fields(hf_config: Any) -> dict[str, Any]:
    """Return the TransformerConfig fields of MoE layers, shared experts and router scores."""
    return {
        "moe_layer_freq": moe_layer_pattern(hf_config),
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size * hf_config.n_shared_experts,
        **precision_and_scale_fields(hf_config),
    }


def precision_and_scale_fields(hf_config: Any) -> dict[str, Any]:
    """Return the TransformerConfig fields of precision and scaling of router scores."""
    return {
        "moe_router_topk_scaling_factor": float(hf_config.routed_scaling_factor),
        # Scores are in float32 for any format of the weights.
        "moe_router_dtype": "fp32",
    }


def moe_layer_pattern(hf_config: Any) -> list[int]:
    """Return 0 for each of the first, dense layers and 1 for each MoE layer.

    Raises an error if `mlp_layer_types` (used by transformers) and `first_k_dense_replace` (used by engines) differ.
    """
    num_layers, kinds = hf_config.num_hidden_layers, getattr(hf_config, "mlp_layer_types", None)
    num_dense: Any = getattr(hf_config, "first_k_dense_replace", None)
    if kinds is None:
        return [int(index >= num_dense) for index in range(num_layers)]
    found = sum(kind == "dense" for kind in kinds)
    if list(kinds) != ["dense"] * found + ["sparse"] * (num_layers - found):
        raise ConfigurationError(
            f"{WHERE} mlp_layer_types: got {shortened(repr(kinds))}, expected {num_layers} entries, 'dense' before "
            "'sparse'"
        )
    if num_dense is not None and min(num_dense, num_layers) != found:
        raise ConfigurationError(
            f"{WHERE} first_k_dense_replace: got {num_dense}, expected {found}, the number of dense layers in "
            "mlp_layer_types, which transformers uses"
        )
    return [int(kind == "sparse") for kind in kinds]


def layers_after_decoder(hf_config: Any, number: int | None) -> list[str]:
    """Return the patterns of the tensors of `number` layers, which come after the decoder layers."""
    first_extra = hf_config.num_hidden_layers
    return [rf"model\.layers\.{index}\..*" for index in range(first_extra, first_extra + max(number or 0, 0))]


def num_mtp_layers(hf_config: Any) -> int:
    return int(getattr(hf_config, "num_nextn_predict_layers", None) or 0)


def kept_tensors(hf_config: Any) -> list[str]:
    """Return the patterns of the tensors of `num_nextn_predict_layers` multi-token prediction layers."""
    return layers_after_decoder(hf_config, num_mtp_layers(hf_config))


MTP_LAYERS = MtpTensors(
    count=num_mtp_layers,
    prefix=lambda hf_config, index: f"model.layers.{hf_config.num_hidden_layers + index}.",
    ends={
        "enorm.weight": "{prefix}enorm.weight",
        "hnorm.weight": "{prefix}hnorm.weight",
        "eh_proj.weight": "{prefix}eh_proj.weight",
        "final_layernorm.weight": "{prefix}shared_head.norm.weight",
    },
    copies={
        "embedding.word_embeddings.weight": "{prefix}embed_tokens.weight",
        "output_layer.weight": "{prefix}shared_head.head.weight",
    },
)

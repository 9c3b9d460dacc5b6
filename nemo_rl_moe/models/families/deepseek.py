# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2: latent attention, shared experts, dense layers before MoE layers."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import biased_routers, decoder
from nemo_rl_moe.models.families.biased_routers import WHERE
from nemo_rl_moe.models.families.decoder import rotary_base
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, Rule, RuleTable, field_names, rule

ATTENTION_READ_FIELDS = (decoder.READ_FIELDS - {"head_dim"}) | field_names(
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
)
READ_FIELDS = (
    ATTENTION_READ_FIELDS | (biased_routers.READ_FIELDS - {"mlp_layer_types"}) | field_names("aux_loss_alpha seq_aux")
)
FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **decoder.FIXED_FIELDS,
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
    "quantization_config": (None,),
}
# Head sizes follow from other fields. `ep_size` is a setting of the program that ran the model.
WITHOUT_EFFECT = field_names("ep_size head_dim qk_head_dim")
ADVICE = {
    "quantization_config": "weights in 8 bits are not read: write the checkpoint in bfloat16 first (DeepSeek's "
    "inference/fp8_cast_bf16.py does it) and take quantization_config out of its config.json"
}

DEEPSEEK_V3_ROUTER_FIELDS: Mapping[str, str | None] = {
    **biased_routers.ROUTER_FIELDS,
    "moe_router_load_balancing_type": "seq_aux",
    "moe_aux_loss_coeff": "aux_loss_alpha",
}
_OF_THE_BIAS = ("moe_router_enable_expert_bias", "moe_router_bias_update_rate")
DEEPSEEK_V2_ROUTER_FIELDS = {
    name: field for name, field in DEEPSEEK_V3_ROUTER_FIELDS.items() if name not in _OF_THE_BIAS
}


def decoder_fields(hf_config: Any) -> dict[str, Any]:
    heads, rotated = hf_config.num_attention_heads, hf_config.qk_rope_head_dim
    head_dim = getattr(hf_config, "head_dim", None)
    if head_dim not in (None, rotated):
        # transformers computes the rotary frequencies from `head_dim`.
        raise ConfigurationError(f"{WHERE} head_dim: got {head_dim}, expected qk_rope_head_dim, which is {rotated}")
    if hf_config.num_key_value_heads != heads:
        raise ConfigurationError(
            f"{WHERE} num_key_value_heads: got {hf_config.num_key_value_heads}, expected num_attention_heads, {heads}"
        )
    return (
        decoder.decoder_fields(hf_config)
        | decoder.expert_fields(
            hf_config, num_experts=hf_config.n_routed_experts, ffn_hidden_size=hf_config.moe_intermediate_size
        )
        | rotary_fields(hf_config)
        | {
            "multi_latent_attention": True,
            "q_lora_rank": hf_config.q_lora_rank,
            "kv_lora_rank": hf_config.kv_lora_rank,
            "qk_head_dim": hf_config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
            "v_head_dim": hf_config.v_head_dim,
            "kv_channels": hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim,
            # Latent attention computes the scale from the fields of YaRN.
            "softmax_scale": None,
            # Every head has separate keys and values, computed from the common latent.
            "num_query_groups": heads,
            "qk_layernorm": True,
        }
        | biased_routers.layer_fields(hf_config)
        | _balancing_fields(hf_config)
    )


def _balancing_fields(hf_config: Any) -> dict[str, Any]:
    """Return the fields of the auxiliary loss. The loss is off if the file has none of its fields."""
    coefficient = float(getattr(hf_config, "aux_loss_alpha", None) or 0.0)
    kind = "seq_aux_loss" if getattr(hf_config, "seq_aux", None) in (True, None) else "aux_loss"
    return {"moe_router_load_balancing_type": kind if coefficient > 0 else "none", "moe_aux_loss_coeff": coefficient}


def rotary_fields(hf_config: Any) -> dict[str, Any]:
    """Return the fields of rotary positions, plain or scaled by YaRN (Peng et al. 2023)."""
    base = {"rotary_base": rotary_base(hf_config), "rotary_percent": 1.0}
    rope = hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        # Latent attention scales its scores by these fields even without YaRN.
        return base | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if kind != "yarn":
        raise ConfigurationError(f"{WHERE} rope_type: got {kind!r}, supported here: 'default' or 'yarn'")
    if not rope.get("truncate", True):
        raise ConfigurationError(f"{WHERE} rope_parameters.truncate: got false, supported here: true")
    original = rope["original_max_position_embeddings"]
    factor = float(rope["factor"] or hf_config.max_position_embeddings / original)
    all_dimensions = float(rope.get("mscale_all_dim") or 0.0)
    return base | {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": _mscale(rope, factor, all_dimensions),
        "mscale_all_dim": all_dimensions,
    }


def _mscale(rope: Mapping[str, Any], factor: float, all_dimensions: float) -> float:
    """Return the `mscale` with which Megatron-Core scales sines and cosines like transformers."""
    # Megatron-Core's factor is `scale(mscale) / scale(all_dimensions)` with `scale(m) = 0.1 m ln(factor) + 1`.
    # transformers' factor is `attention_factor` if it is given. Otherwise it is the same as Megatron-Core's if `mscale`
    # and `mscale_all_dim` are given, else `scale(1)`.
    if rope.get("mscale") and all_dimensions and rope.get("attention_factor") is None:
        return float(rope["mscale"])
    if factor <= 1:
        return 1.0
    step = 0.1 * math.log(factor)
    wanted = rope.get("attention_factor")
    wanted = step + 1 if wanted is None else float(wanted)
    return (wanted * (step * all_dimensions + 1) - 1) / step


_ATTENTION = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
RULES: dict[str, Rule] = {
    **decoder.ENDS,
    **decoder.LAYER_NORMS,
    **{
        f"{decoder.LAYER}self_attention.{ours}.weight": rule(f"{decoder.HF_LAYER}self_attn.{theirs}.weight")
        for ours, theirs in _ATTENTION.items()
    },
    **decoder.DENSE_MLP,
    **decoder.ROUTER,
    **decoder.EXPERTS,
    **biased_routers.SHARED_EXPERTS,
}


DEEPSEEK_V2_FIXED_FIELDS = {
    **FIXED_FIELDS,
    "mlp_bias": (False,),
    # transformers ignores this field and never normalises.
    "norm_topk_prob": (False, None),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
}


def deepseek_v2_fields(hf_config: Any) -> dict[str, Any]:
    no_groups = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return (
        decoder_fields(hf_config)
        | (biased_routers.group_fields(hf_config) if hf_config.topk_method == "group_limited_greedy" else no_groups)
        | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
    )


DEEPSEEK_V2 = ModelFamily(
    name="DeepSeek-V2",
    transformer_fields=deepseek_v2_fields,
    rotary_base=rotary_base,
    rules=RuleTable(RULES),
    config_fields=ConfigFields(READ_FIELDS, DEEPSEEK_V2_FIXED_FIELDS, WITHOUT_EFFECT, ADVICE),
    router_fields=DEEPSEEK_V2_ROUTER_FIELDS,
)


DEEPSEEK_V3_FIXED_FIELDS = {**FIXED_FIELDS, **biased_routers.FIXED_FIELDS, "rope_interleave": (True, None)}
DEEPSEEK_V3_WITHOUT_EFFECT = WITHOUT_EFFECT | biased_routers.WITHOUT_EFFECT


def deepseek_v3_fields(hf_config: Any) -> dict[str, Any]:
    return (
        decoder_fields(hf_config)
        | biased_routers.group_fields(hf_config)
        | biased_routers.score_fields(hf_config, "DeepSeek-V3")
    )


DEEPSEEK_V3 = ModelFamily(
    name="DeepSeek-V3",
    transformer_fields=deepseek_v3_fields,
    rotary_base=rotary_base,
    rules=RuleTable({**RULES, **biased_routers.EXPERT_BIAS}),
    config_fields=ConfigFields(READ_FIELDS, DEEPSEEK_V3_FIXED_FIELDS, DEEPSEEK_V3_WITHOUT_EFFECT, ADVICE),
    router_fields=DEEPSEEK_V3_ROUTER_FIELDS,
    kept_tensors=biased_routers.kept_tensors,
    mtp_layers=biased_routers.MTP_LAYERS,
    exported_fields=biased_routers.EXPORTED_FIELDS,
)


# The files equal DeepSeek-V3's except for the model type. Engines choose their settings by this type.
KIMI_K2 = replace(DEEPSEEK_V3, name="Kimi-K2", transformers_type="deepseek_v3")

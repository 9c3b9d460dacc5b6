# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: sigmoid scores with an expert bias, norms over all heads, partial rotation of each head."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import biased_routers, decoder, softmax_moe
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, RuleTable, Source, field_names, rule

READ_FIELDS = decoder.READ_FIELDS | field_names(
    "attn_type_list num_experts num_experts_per_tok num_local_experts num_mtp_modules partial_rotary_factor rotary_dim "
    "router_aux_loss_coef"
)
FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **decoder.FIXED_FIELDS,
    "attention_bias": (False,),
    "qk_norm_type": ("per_layer",),
    "quantization_config": (None,),
    "router_jitter_noise": (0.0,),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "sliding_window": (None,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
# Fields of similar models, or of multi-token prediction layers, which are kept, not computed.
WITHOUT_EFFECT = field_names(
    "layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta mlp_intermediate_size "
    "mtp_transformer_layers shared_moe_mode use_mtp"
)
ADVICE = {
    "quantization_config": "weights in 8 bits are not read: write the checkpoint in bfloat16 first, and take "
    "quantization_config out of its config.json"
}
_FULL_ATTENTION = 1
_IN_MEMORY = f"{decoder.HF_LAYER}mlp.e_score_correction_bias"
EXPERT_BIAS = {
    f"{decoder.LAYER}mlp.router.expert_bias": rule(
        f"{decoder.HF_LAYER}block_sparse_moe.e_score_correction_bias", alternatives=[[Source(_IN_MEMORY)]]
    )
}


def minimax_m2_fields(hf_config: Any) -> dict[str, Any]:
    kinds = getattr(hf_config, "attn_type_list", None)
    if kinds is not None and any(kind != _FULL_ATTENTION for kind in kinds):
        raise ConfigurationError(
            f"{biased_routers.WHERE} attn_type_list: got {shortened(repr(kinds))}, supported: {_FULL_ATTENTION} for "
            "every layer"
        )
    return (
        decoder.decoder_fields(hf_config, rotates_part=True)
        | decoder.expert_fields(
            hf_config, num_experts=hf_config.num_local_experts, ffn_hidden_size=hf_config.intermediate_size
        )
        | biased_routers.score_fields(hf_config, "MiniMax-M2")
        | {"qk_layernorm": True}
    )


def kept_tensors(hf_config: Any) -> list[str]:
    return biased_routers.layers_after_decoder(hf_config, getattr(hf_config, "num_mtp_modules", None))


MINIMAX_M2 = ModelFamily(
    name="MiniMax-M2",
    transformer_fields=minimax_m2_fields,
    rotary_base=decoder.rotary_base,
    rotary_percent=decoder.rotary_percent,
    rules=RuleTable({**decoder.DECODER, **decoder.QK_NORMS, **softmax_moe.MIXTRAL_EXPERTS, **EXPERT_BIAS}),
    config_fields=ConfigFields(READ_FIELDS, FIXED_FIELDS, WITHOUT_EFFECT, ADVICE),
    router_fields={
        **decoder.SOFTMAX_ROUTER_FIELDS,
        "moe_router_pre_softmax": None,
        "moe_router_enable_expert_bias": None,
        "moe_router_bias_update_rate": None,
    },
    kept_tensors=kept_tensors,
    exported_fields={"num_mtp_modules": 0, "use_mtp": False},
    normalizes_all_heads=True,
)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 to GLM-4.7 and GLM-4.7-Flash: DeepSeek-V3's routers with grouped-query or latent attention."""

from typing import Any

from nemo_rl_moe.models.families import biased_routers, decoder, deepseek
from nemo_rl_moe.models.families.decoder import rotary_base
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, RuleTable, field_names

GLM4_MOE_READ_FIELDS = (
    decoder.READ_FIELDS
    | (biased_routers.READ_FIELDS - {"mlp_layer_types"})
    | field_names("attention_bias partial_rotary_factor use_qk_norm")
)
GLM4_MOE_FIXED_FIELDS = {
    **decoder.FIXED_FIELDS,
    **biased_routers.FIXED_FIELDS,
    "quantization_config": (None,),
}


def glm4_moe_fields(hf_config: Any) -> dict[str, Any]:
    return (
        decoder.decoder_fields(hf_config, rotates_part=True)
        | decoder.expert_fields(
            hf_config, num_experts=hf_config.n_routed_experts, ffn_hidden_size=hf_config.moe_intermediate_size
        )
        | biased_routers.layer_fields(hf_config)
        | biased_routers.group_fields(hf_config)
        | biased_routers.score_fields(hf_config, "GLM-4-MoE")
        | {"add_qkv_bias": hf_config.attention_bias, "qk_layernorm": hf_config.use_qk_norm}
    )


GLM4_MOE_RULES = {
    **decoder.DECODER,
    **decoder.QKV_BIAS,
    **decoder.QK_NORMS,
    **decoder.ROUTER,
    **decoder.EXPERTS,
    **biased_routers.SHARED_EXPERTS,
    **biased_routers.EXPERT_BIAS,
}
GLM4_MOE = ModelFamily(
    name="GLM-4-MoE",
    transformer_fields=glm4_moe_fields,
    rotary_base=rotary_base,
    rotary_percent=decoder.rotary_percent,
    rules=RuleTable(GLM4_MOE_RULES),
    config_fields=ConfigFields(GLM4_MOE_READ_FIELDS, GLM4_MOE_FIXED_FIELDS, biased_routers.WITHOUT_EFFECT),
    router_fields=biased_routers.ROUTER_FIELDS,
    kept_tensors=biased_routers.kept_tensors,
    mtp_layers=biased_routers.MTP_LAYERS,
    exported_fields=biased_routers.EXPORTED_FIELDS,
)


GLM4_MOE_LITE_FIXED_FIELDS = {**deepseek.DEEPSEEK_V3_FIXED_FIELDS, "partial_rotary_factor": (1.0,)}


def glm4_moe_lite_fields(hf_config: Any) -> dict[str, Any]:
    return (
        deepseek.decoder_fields(hf_config)
        | biased_routers.group_fields(hf_config)
        | biased_routers.score_fields(hf_config, "GLM-4-MoE-Lite")
    )


GLM4_MOE_LITE = ModelFamily(
    name="GLM-4-MoE-Lite",
    transformer_fields=glm4_moe_lite_fields,
    rotary_base=rotary_base,
    rules=deepseek.DEEPSEEK_V3.rules,
    config_fields=ConfigFields(
        deepseek.ATTENTION_READ_FIELDS | biased_routers.READ_FIELDS,
        GLM4_MOE_LITE_FIXED_FIELDS,
        deepseek.DEEPSEEK_V3_WITHOUT_EFFECT,
    ),
    router_fields=biased_routers.ROUTER_FIELDS,
    kept_tensors=biased_routers.kept_tensors,
    mtp_layers=biased_routers.MTP_LAYERS,
    exported_fields=biased_routers.EXPORTED_FIELDS,
)

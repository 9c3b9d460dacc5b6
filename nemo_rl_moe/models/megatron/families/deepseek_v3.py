# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and Moonlight: sigmoid scores, chosen with a bias on each expert that no gradient moves."""

from typing import Any

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families import decoder, deepseek
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields, field_names
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rotary import rotary_base
from nemo_rl_moe.models.megatron.families.rules import RuleTable, rule

FIXED_FIELDS = {
    **deepseek.FIXED_FIELDS,
    # Megatron-Core always normalises sigmoid scores.
    "norm_topk_prob": (True,),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
# Layers that predict further tokens are left out.
WITHOUT_EFFECT = deepseek.WITHOUT_EFFECT | field_names("num_mtp_layers num_nextn_predict_layers")
ROUTER_FIELDS = {
    **deepseek.ROUTER_FIELDS,
    "moe_router_enable_expert_bias": None,
    "moe_router_bias_update_rate": None,
}
EXPERT_BIAS = {f"{decoder.LAYER}mlp.router.expert_bias": rule(f"{decoder.HF_LAYER}mlp.gate.e_score_correction_bias")}


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields.

    Raises:
        ConfigurationError: As of `decoder_fields`, or a token goes to one expert.
    """
    if hf_config.num_experts_per_tok < 2:
        # transformers makes its weight 1, and Megatron-Core takes the score.
        raise ConfigurationError(
            f"{deepseek.WHERE} num_experts_per_tok: got {hf_config.num_experts_per_tok}, supported for DeepSeek-V3: "
            "2 or more"
        )
    return (
        deepseek.decoder_fields(hf_config)
        | deepseek.group_fields(hf_config)
        | {
            "moe_router_score_function": "sigmoid",
            # Without effect on sigmoid scores.
            "moe_router_pre_softmax": False,
            "moe_router_enable_expert_bias": True,
            # As in the last phase of DeepSeek-V3's own training (DeepSeek-AI 2024, 4.2): it stays where it is.
            "moe_router_bias_update_rate": 0.0,
        }
    )


FAMILY = ModelFamily(
    name="DeepSeek-V3",
    transformer_fields=transformer_fields,
    rotary_base=rotary_base,
    rules=RuleTable({**deepseek.RULES, **EXPERT_BIAS}),
    config_fields=ConfigFields(deepseek.READ_FIELDS, FIXED_FIELDS, WITHOUT_EFFECT, deepseek.ADVICE),
    router_fields=ROUTER_FIELDS,
    unused_tensors=deepseek.unused_tensors,
    exported_fields={"num_nextn_predict_layers": 0},
    change_block=deepseek.change_block,
)

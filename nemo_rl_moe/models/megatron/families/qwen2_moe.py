# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE: Qwen2's attention; beside the routed experts one that every token goes through, behind a gate."""

from typing import Any

from nemo_rl_moe.models.megatron.families import decoder, qwen2, qwen3, qwen3_moe
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields, field_names
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rules import RuleTable, rule

READ_FIELDS = qwen3_moe.READ_FIELDS | field_names("qkv_bias shared_expert_intermediate_size")
_SHARED_EXPERT_GATE = {
    f"{decoder.LAYER}mlp.shared_experts.gate_weight": rule(f"{decoder.HF_LAYER}mlp.shared_expert_gate.weight")
}


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields."""
    return (
        decoder.decoder_fields(hf_config)
        | qwen3_moe.routed_expert_fields(hf_config)
        | {
            "add_qkv_bias": hf_config.qkv_bias,
            "moe_shared_expert_intermediate_size": hf_config.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }
    )


FAMILY = ModelFamily(
    name="Qwen2-MoE",
    transformer_fields=transformer_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable(
        {
            **decoder.DECODER,
            **decoder.QKV_BIAS,
            **decoder.ROUTER,
            **decoder.EXPERTS,
            **decoder.swiglu("mlp.shared_experts", "mlp.shared_expert"),
            **_SHARED_EXPERT_GATE,
        }
    ),
    config_fields=ConfigFields(READ_FIELDS, qwen2.FIXED_FIELDS, qwen3.WITHOUT_EFFECT),
    router_fields=decoder.SOFTMAX_ROUTER_FIELDS,
)

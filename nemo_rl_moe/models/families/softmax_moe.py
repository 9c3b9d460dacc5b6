# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Families whose routers take a softmax over all experts: Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE."""

from typing import Any

from nemo_rl_moe.models.families import decoder, dense
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, RuleTable, Source, field_names, rule

MIXTRAL_READ_FIELDS = decoder.READ_FIELDS | field_names("num_experts_per_tok num_local_experts router_aux_loss_coef")
MIXTRAL_FIXED_FIELDS = {**dense.MISTRAL_FIXED_FIELDS, "router_jitter_noise": (0.0,)}

_OURS, _THEIRS, _IN_MEMORY = (f"{decoder.LAYER}mlp.", f"{decoder.HF_LAYER}block_sparse_moe.", f"{decoder.HF_LAYER}mlp.")
_OF_FC1, _OF_FC2 = decoder.stacked_swiglu_experts(f"{_IN_MEMORY}experts")
MIXTRAL_EXPERTS = {
    f"{_OURS}router.weight": rule(f"{_THEIRS}gate.weight", alternatives=[[Source(f"{_IN_MEMORY}gate.weight")]]),
    f"{_OURS}experts.{{expert}}.linear_fc1.weight": rule(
        f"{_THEIRS}experts.{{expert}}.w1.weight", f"{_THEIRS}experts.{{expert}}.w3.weight", alternatives=_OF_FC1
    ),
    f"{_OURS}experts.{{expert}}.linear_fc2.weight": rule(
        f"{_THEIRS}experts.{{expert}}.w2.weight", alternatives=_OF_FC2
    ),
}


def mixtral_fields(hf_config: Any) -> dict[str, Any]:
    experts = decoder.expert_fields(
        hf_config, num_experts=hf_config.num_local_experts, ffn_hidden_size=hf_config.intermediate_size
    )
    # The weights are a softmax over the logits of the chosen experts only.
    return decoder.decoder_fields(hf_config) | experts | {"moe_router_pre_softmax": False}


MIXTRAL = ModelFamily(
    name="Mixtral",
    transformer_fields=mixtral_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **MIXTRAL_EXPERTS}),
    config_fields=ConfigFields(MIXTRAL_READ_FIELDS, MIXTRAL_FIXED_FIELDS),
    router_fields={**decoder.SOFTMAX_ROUTER_FIELDS, "moe_router_pre_softmax": None},
)


OLMOE_READ_FIELDS = decoder.READ_FIELDS | field_names(
    "norm_topk_prob num_experts num_experts_per_tok num_local_experts router_aux_loss_coef"
)
OLMOE_FIXED_FIELDS = {**decoder.FIXED_FIELDS, "attention_bias": (False,), "clip_qkv": (None,)}


def olmoe_fields(hf_config: Any) -> dict[str, Any]:
    experts = decoder.expert_fields(
        hf_config, num_experts=hf_config.num_experts, ffn_hidden_size=hf_config.intermediate_size
    )
    return (
        decoder.decoder_fields(hf_config)
        | experts
        | {"qk_layernorm": True, "moe_router_pre_softmax": not hf_config.norm_topk_prob}
    )


OLMOE = ModelFamily(
    name="OLMoE",
    transformer_fields=olmoe_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QK_NORMS, **decoder.ROUTER, **decoder.EXPERTS}),
    config_fields=ConfigFields(OLMOE_READ_FIELDS, OLMOE_FIXED_FIELDS),
    router_fields=decoder.SOFTMAX_ROUTER_FIELDS,
    normalizes_all_heads=True,
)


QWEN3_MOE_READ_FIELDS = decoder.READ_FIELDS | field_names(
    "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok "
    "num_local_experts router_aux_loss_coef"
)
# Released files also have fields of other families, with values that fit this family.
QWEN3_MOE_FIXED_FIELDS = {
    **dense.QWEN3_FIXED_FIELDS,
    "qkv_bias": (False,),
    "shared_expert_intermediate_size": (0, None),
    "use_qk_norm": (True,),
}


def moe_layer_pattern(hf_config: Any) -> list[int]:
    """Return 1 for each MoE layer, and 0 for each dense layer."""
    return [
        int(index not in (hf_config.mlp_only_layers or []) and (index + 1) % hf_config.decoder_sparse_step == 0)
        for index in range(hf_config.num_hidden_layers)
    ]


def routed_expert_fields(hf_config: Any) -> dict[str, Any]:
    experts = decoder.expert_fields(
        hf_config, num_experts=hf_config.num_experts, ffn_hidden_size=hf_config.moe_intermediate_size
    )
    return experts | {
        "moe_layer_freq": moe_layer_pattern(hf_config),
        # A softmax over the chosen experts' logits equals a softmax over all logits, normalised over these experts.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
    }


def qwen3_moe_fields(hf_config: Any) -> dict[str, Any]:
    return dense.qwen3_fields(hf_config) | routed_expert_fields(hf_config)


QWEN3_MOE = ModelFamily(
    name="Qwen3-MoE",
    transformer_fields=qwen3_moe_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QK_NORMS, **decoder.ROUTER, **decoder.EXPERTS}),
    config_fields=ConfigFields(QWEN3_MOE_READ_FIELDS, QWEN3_MOE_FIXED_FIELDS, dense.QWEN3_WITHOUT_EFFECT),
    router_fields=decoder.SOFTMAX_ROUTER_FIELDS,
)


QWEN2_MOE_READ_FIELDS = QWEN3_MOE_READ_FIELDS | field_names("qkv_bias shared_expert_intermediate_size")
SHARED_EXPERT = {
    **decoder.swiglu("mlp.shared_experts", "mlp.shared_expert"),
    f"{decoder.LAYER}mlp.shared_experts.gate_weight": rule(f"{decoder.HF_LAYER}mlp.shared_expert_gate.weight"),
}


def shared_expert_fields(hf_config: Any) -> dict[str, Any]:
    return {
        "moe_shared_expert_intermediate_size": hf_config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def qwen2_moe_fields(hf_config: Any) -> dict[str, Any]:
    return (
        decoder.decoder_fields(hf_config)
        | routed_expert_fields(hf_config)
        | shared_expert_fields(hf_config)
        | {"add_qkv_bias": hf_config.qkv_bias}
    )


QWEN2_MOE = ModelFamily(
    name="Qwen2-MoE",
    transformer_fields=qwen2_moe_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable(
        {
            **decoder.DECODER,
            **decoder.QKV_BIAS,
            **decoder.ROUTER,
            **decoder.EXPERTS,
            **SHARED_EXPERT,
        }
    ),
    config_fields=ConfigFields(QWEN2_MOE_READ_FIELDS, dense.QWEN2_FIXED_FIELDS, dense.QWEN3_WITHOUT_EFFECT),
    router_fields=decoder.SOFTMAX_ROUTER_FIELDS,
)

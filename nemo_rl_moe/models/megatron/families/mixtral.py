# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixtral: the plain decoder with experts in every layer, under names of their own."""

from typing import Any

from nemo_rl_moe.models.megatron.families import decoder, mistral
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields, field_names
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rules import RuleTable, Source, rule

READ_FIELDS = decoder.READ_FIELDS | field_names("num_experts_per_tok num_local_experts router_aux_loss_coef")
FIXED_FIELDS = {**mistral.FIXED_FIELDS, "router_jitter_noise": (0.0,)}

_OURS, _THEIRS, _IN_MEMORY = (
    f"{decoder.LAYER}mlp.",
    f"{decoder.HF_LAYER}block_sparse_moe.",
    f"{decoder.HF_LAYER}mlp.",
)
_OF_FC1, _OF_FC2 = decoder.stacked_swiglu_experts(f"{_IN_MEMORY}experts")
_EXPERTS = {
    f"{_OURS}router.weight": rule(f"{_THEIRS}gate.weight", alternatives=[[Source(f"{_IN_MEMORY}gate.weight")]]),
    f"{_OURS}experts.{{expert}}.linear_fc1.weight": rule(
        f"{_THEIRS}experts.{{expert}}.w1.weight",
        f"{_THEIRS}experts.{{expert}}.w3.weight",
        alternatives=_OF_FC1,
    ),
    f"{_OURS}experts.{{expert}}.linear_fc2.weight": rule(
        f"{_THEIRS}experts.{{expert}}.w2.weight", alternatives=_OF_FC2
    ),
}


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields."""
    experts = decoder.expert_fields(
        hf_config, num_experts=hf_config.num_local_experts, ffn_hidden_size=hf_config.intermediate_size
    )
    # The weights of the chosen experts add up to 1: a softmax over their logits alone.
    return decoder.decoder_fields(hf_config) | experts | {"moe_router_pre_softmax": False}


FAMILY = ModelFamily(
    name="Mixtral",
    transformer_fields=transformer_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **_EXPERTS}),
    config_fields=ConfigFields(READ_FIELDS, FIXED_FIELDS),
    router_fields={**decoder.SOFTMAX_ROUTER_FIELDS, "moe_router_pre_softmax": None},
)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""OLMoE: experts in every layer; all query heads are normalised together, and so are all keys."""

from typing import Any

from nemo_rl_moe.models.megatron.families import decoder
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields, field_names
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rules import RuleTable

READ_FIELDS = decoder.READ_FIELDS | field_names(
    "norm_topk_prob num_experts num_experts_per_tok num_local_experts router_aux_loss_coef"
)
FIXED_FIELDS = {**decoder.FIXED_FIELDS, "attention_bias": (False,), "clip_qkv": (None,)}


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields."""
    experts = decoder.expert_fields(
        hf_config, num_experts=hf_config.num_experts, ffn_hidden_size=hf_config.intermediate_size
    )
    return (
        decoder.decoder_fields(hf_config)
        | experts
        | {"qk_layernorm": True, "moe_router_pre_softmax": not hf_config.norm_topk_prob}
    )


def change_block(config: Any, block: Any) -> Any:
    """Puts norms over all heads where Megatron-Core has those of each head."""
    from nemo_rl_moe.models.megatron.all_heads_norm import normalize_all_heads

    return normalize_all_heads(block)


FAMILY = ModelFamily(
    name="OLMoE",
    transformer_fields=transformer_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QK_NORMS, **decoder.ROUTER, **decoder.EXPERTS}),
    config_fields=ConfigFields(READ_FIELDS, FIXED_FIELDS),
    router_fields=decoder.SOFTMAX_ROUTER_FIELDS,
    change_block=change_block,
)

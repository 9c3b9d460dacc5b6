# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3's layers with SwiGLU experts in all or some of them."""

from typing import Any

from nemo_rl_moe.models.megatron.families import decoder, qwen3
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields, field_names
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rules import RuleTable

READ_FIELDS = decoder.READ_FIELDS | field_names(
    "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok "
    "num_local_experts router_aux_loss_coef"
)
# Released files hold fields of other families too, at values that fit this one.
FIXED_FIELDS = {
    **qwen3.FIXED_FIELDS,
    "qkv_bias": (False,),
    "shared_expert_intermediate_size": (0, None),
    "use_qk_norm": (True,),
}


def moe_layer_pattern(hf_config: Any) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    return [
        int(index not in (hf_config.mlp_only_layers or []) and (index + 1) % hf_config.decoder_sparse_step == 0)
        for index in range(hf_config.num_hidden_layers)
    ]


def routed_expert_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields of the routed experts and their layers."""
    experts = decoder.expert_fields(
        hf_config, num_experts=hf_config.num_experts, ffn_hidden_size=hf_config.moe_intermediate_size
    )
    return experts | {
        "moe_layer_freq": moe_layer_pattern(hf_config),
        # Softmax over the chosen experts' logits equals softmax over all of them, normalised over the chosen.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
    }


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields."""
    return qwen3.transformer_fields(hf_config) | routed_expert_fields(hf_config)


FAMILY = ModelFamily(
    name="Qwen3-MoE",
    transformer_fields=transformer_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QK_NORMS, **decoder.ROUTER, **decoder.EXPERTS}),
    config_fields=ConfigFields(READ_FIELDS, FIXED_FIELDS, qwen3.WITHOUT_EFFECT),
    router_fields=decoder.SOFTMAX_ROUTER_FIELDS,
)

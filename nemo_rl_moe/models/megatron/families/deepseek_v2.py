# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2: softmax over all experts, and the best of a group says which groups a token may use."""

from typing import Any

from nemo_rl_moe.models.megatron.families import deepseek
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rotary import rotary_base
from nemo_rl_moe.models.megatron.families.rules import RuleTable

FIXED_FIELDS = {
    **deepseek.FIXED_FIELDS,
    "mlp_bias": (False,),
    # transformers takes the scores as they are, whatever the file says.
    "norm_topk_prob": (False, None),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
}


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields."""
    no_groups = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return (
        deepseek.decoder_fields(hf_config)
        | (deepseek.group_fields(hf_config) if hf_config.topk_method == "group_limited_greedy" else no_groups)
        | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
    )


FAMILY = ModelFamily(
    name="DeepSeek-V2",
    transformer_fields=transformer_fields,
    rotary_base=rotary_base,
    rules=RuleTable(deepseek.RULES),
    config_fields=ConfigFields(deepseek.READ_FIELDS, FIXED_FIELDS, deepseek.WITHOUT_EFFECT, deepseek.ADVICE),
    router_fields=deepseek.ROUTER_FIELDS,
    unused_tensors=deepseek.unused_tensors,
    change_block=deepseek.change_block,
)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""dots.llm1 and Solar Open: GLM-4-MoE's experts and routers, with the attention of Qwen3 and of Llama."""

import copy
from dataclasses import replace
from typing import Any

from nemo_rl_moe.models.families import biased_routers, decoder, glm
from nemo_rl_moe.models.families.rules import ConfigFields, RuleTable, field_names

_READ_FIELDS = (decoder.READ_FIELDS | biased_routers.READ_FIELDS) - {"mlp_layer_types"}
_FIXED_FIELDS = {**glm.GLM4_MOE_FIXED_FIELDS, "attention_bias": (False,)}
_LAYERS = {**decoder.DECODER, **decoder.ROUTER, **decoder.EXPERTS}
_EXPERTS_AND_ROUTERS = {**_LAYERS, **biased_routers.SHARED_EXPERTS, **biased_routers.EXPERT_BIAS}


def _fields(hf_config: Any, family: str) -> dict[str, Any]:
    """Return the fields of both families, without norms of queries and keys."""
    return (
        decoder.decoder_fields(hf_config)
        | decoder.expert_fields(
            hf_config, num_experts=hf_config.n_routed_experts, ffn_hidden_size=hf_config.moe_intermediate_size
        )
        | biased_routers.layer_fields(hf_config)
        | biased_routers.group_fields(hf_config)
        | biased_routers.score_fields(hf_config, family)
    )


def dots1_fields(hf_config: Any) -> dict[str, Any]:
    return _fields(hf_config, "dots.llm1") | {"qk_layernorm": True}


DOTS1 = replace(
    glm.GLM4_MOE,
    name="dots.llm1",
    mtp_layers=None,
    transformer_fields=dots1_fields,
    rotary_percent=lambda hf_config: 1.0,
    rules=RuleTable({**_EXPERTS_AND_ROUTERS, **decoder.QK_NORMS}),
    config_fields=ConfigFields(
        _READ_FIELDS,
        {
            **_FIXED_FIELDS,
            "moe_layer_freq": (1,),
            # Released files name the choice of experts here. Scores are sigmoids for any value.
            "scoring_func": ("sigmoid", "noaux_tc"),
            "sliding_window": (None,),
            "use_sliding_window": (False,),
        },
        # Without a sliding window, all layers attend to all tokens.
        biased_routers.WITHOUT_EFFECT | field_names("layer_types max_window_layers"),
    ),
)


def solar_open_fields(hf_config: Any) -> dict[str, Any]:
    # No layer is dense, so that `intermediate_size` has no effect, and transformers leaves it out.
    hf_config = copy.copy(hf_config)
    hf_config.intermediate_size, hf_config.first_k_dense_replace = hf_config.moe_intermediate_size, 0
    return _fields(hf_config, "Solar Open")


SOLAR_OPEN = replace(
    glm.GLM4_MOE,
    name="Solar Open",
    mtp_layers=None,
    transformer_fields=solar_open_fields,
    rotary_percent=lambda hf_config: 1.0,
    rules=RuleTable(_EXPERTS_AND_ROUTERS),
    config_fields=ConfigFields(
        _READ_FIELDS - {"first_k_dense_replace", "intermediate_size"},
        {**_FIXED_FIELDS, "first_k_dense_replace": (0,), "use_qk_norm": (False,)},
        biased_routers.WITHOUT_EFFECT | field_names("intermediate_size"),
    ),
)

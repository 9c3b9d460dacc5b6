# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen2 without experts: queries, keys and values have biases."""

from typing import Any

from nemo_rl_moe.models.megatron.families import decoder, qwen3
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rules import RuleTable

FIXED_FIELDS = {**decoder.FIXED_FIELDS, "use_mrope": (False,), "use_sliding_window": (False,)}


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields."""
    return decoder.decoder_fields(hf_config) | {"add_qkv_bias": True}


FAMILY = ModelFamily(
    name="Qwen2",
    transformer_fields=transformer_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QKV_BIAS}),
    config_fields=ConfigFields(decoder.READ_FIELDS, FIXED_FIELDS, qwen3.WITHOUT_EFFECT),
    router_fields={},
)

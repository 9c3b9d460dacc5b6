# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3 without experts: every query and key head is normalised."""

from typing import Any

from nemo_rl_moe.models.megatron.families import decoder
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields, field_names
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rules import RuleTable

FIXED_FIELDS = {**decoder.FIXED_FIELDS, "attention_bias": (False,), "use_sliding_window": (False,)}
# With the sliding window off these have no effect.
WITHOUT_EFFECT = field_names("sliding_window max_window_layers layer_types")


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    """Hugging Face fields to TransformerConfig fields."""
    return decoder.decoder_fields(hf_config) | {"qk_layernorm": True}


FAMILY = ModelFamily(
    name="Qwen3",
    transformer_fields=transformer_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QK_NORMS}),
    config_fields=ConfigFields(decoder.READ_FIELDS, FIXED_FIELDS, WITHOUT_EFFECT),
    router_fields={},
)

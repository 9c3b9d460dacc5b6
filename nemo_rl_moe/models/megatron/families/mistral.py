# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mistral: the plain decoder; the releases without a sliding window."""

from nemo_rl_moe.models.megatron.families import decoder
from nemo_rl_moe.models.megatron.families.config_fields import ConfigFields
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.rules import RuleTable

FIXED_FIELDS = {**decoder.FIXED_FIELDS, "sliding_window": (None,)}

FAMILY = ModelFamily(
    name="Mistral",
    transformer_fields=decoder.decoder_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable(decoder.DECODER),
    config_fields=ConfigFields(decoder.READ_FIELDS, FIXED_FIELDS),
    router_fields={},
)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Dense families: Llama, Mistral, Qwen2 and Qwen3."""

from typing import Any

from nemo_rl_moe.models.families import decoder
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, RuleTable, field_names

LLAMA_FIXED_FIELDS = {**decoder.FIXED_FIELDS, "attention_bias": (False,), "mlp_bias": (False,)}

LLAMA = ModelFamily(
    name="Llama",
    transformer_fields=decoder.decoder_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable(decoder.DECODER),
    config_fields=ConfigFields(decoder.READ_FIELDS, LLAMA_FIXED_FIELDS),
)


MISTRAL_FIXED_FIELDS = {**decoder.FIXED_FIELDS, "sliding_window": (None,)}

MISTRAL = ModelFamily(
    name="Mistral",
    transformer_fields=decoder.decoder_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable(decoder.DECODER),
    config_fields=ConfigFields(decoder.READ_FIELDS, MISTRAL_FIXED_FIELDS),
)


QWEN3_FIXED_FIELDS = {**decoder.FIXED_FIELDS, "attention_bias": (False,), "use_sliding_window": (False,)}
# Without the sliding window these fields have no effect.
QWEN3_WITHOUT_EFFECT = field_names("sliding_window max_window_layers layer_types")


def qwen3_fields(hf_config: Any) -> dict[str, Any]:
    return decoder.decoder_fields(hf_config) | {"qk_layernorm": True}


QWEN3 = ModelFamily(
    name="Qwen3",
    transformer_fields=qwen3_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QK_NORMS}),
    config_fields=ConfigFields(decoder.READ_FIELDS, QWEN3_FIXED_FIELDS, QWEN3_WITHOUT_EFFECT),
)


QWEN2_FIXED_FIELDS = {**decoder.FIXED_FIELDS, "use_mrope": (False,), "use_sliding_window": (False,)}


def qwen2_fields(hf_config: Any) -> dict[str, Any]:
    return decoder.decoder_fields(hf_config) | {"add_qkv_bias": True}


QWEN2 = ModelFamily(
    name="Qwen2",
    transformer_fields=qwen2_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable({**decoder.DECODER, **decoder.QKV_BIAS}),
    config_fields=ConfigFields(decoder.READ_FIELDS, QWEN2_FIXED_FIELDS, QWEN3_WITHOUT_EFFECT),
)

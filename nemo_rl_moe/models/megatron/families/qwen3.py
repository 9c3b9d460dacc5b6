# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3 without experts."""

from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.families.qwen3_common import (
    common_transformer_fields,
    names_in_dense_layer,
    rotary_base,
    tensor_rules,
)

FAMILY = ModelFamily(common_transformer_fields, rotary_base, *tensor_rules(names_in_dense_layer))

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 as released: its text models with Qwen3-VL's vision tower, but without features for deeper layers."""

from dataclasses import replace
from typing import Any

from nemo_rl_moe.models.families import qwen_next, qwen_vl
from nemo_rl_moe.models.families.rules import ConfigFields, RuleTable, field_names
from nemo_rl_moe.models.families.tower_shape import TowerShape
from nemo_rl_moe.models.families.vision import VisionFamily


def _shape(hf_config: Any) -> TowerShape:
    return qwen_vl.tower_shape(hf_config, is_gated=False)


def _problems(flat: Any) -> list[str]:
    entries = flat.vision_config.num_position_embeddings
    return [*qwen_vl.size_problems(flat), *qwen_vl.position_table_problems(entries)]


_DECODER = replace(
    qwen_next.QWEN3_5_TEXT, rules=RuleTable(qwen_next.QWEN3_5_RULES), unused_tensors=lambda hf_config: {}
)
QWEN3_5 = VisionFamily(
    name="Qwen3.5",
    decoder=_DECODER,
    config_fields=ConfigFields(qwen_vl.OUTER_FIELDS),
    tower_fields=ConfigFields(
        qwen_vl.TOWER_FIELDS | field_names("num_position_embeddings"),
        {**qwen_vl.TOWER_FIXED, "deepstack_visual_indexes": ([], None)},
    ),
    decoder_name=qwen_vl.QWEN3_VL.decoder_name,
    prefixes=qwen_vl.QWEN3_VL.prefixes,
    projector=("vision.merger.",),
    build=qwen_vl.build_tower,
    encode=qwen_vl.encode,
    pixels_per_token=qwen_vl.pixels_per_token,
    shape=_shape,
    has_mrope=True,
    interleaves_mrope=True,
    problems=_problems,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3.5-MoE",
    decoder=replace(
        qwen_next.QWEN3_5_MOE_TEXT,
        rules=RuleTable(qwen_next.QWEN3_5_MOE_RULES),
        unused_tensors=lambda hf_config: {},
    ),
)

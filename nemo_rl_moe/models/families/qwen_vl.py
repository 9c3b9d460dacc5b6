# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen's vision-language families: Qwen2.5-VL."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from nemo_rl_moe.models.families import dense
from nemo_rl_moe.models.families.rules import ConfigFields, field_names
from nemo_rl_moe.models.families.vision import TowerOutput, VisionFamily, built_config
from nemo_rl_moe.models.picture_patches import merged_patches

_FRAMES = 2
"""Frames of a patch; a picture is a film of two equal ones."""


def build_tower(hf_config: Any, config_class: type) -> nn.Module:
    """Transformers' tower of a flattened configuration, which ends with the projector (`merger`)."""
    from transformers import AutoModel

    tower: nn.Module = AutoModel.from_config(
        built_config(hf_config.vision_config, config_class), attn_implementation="sdpa", dtype=torch.float32
    )
    return tower


def _build_qwen2_5(hf_config: Any) -> nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    return build_tower(hf_config, Qwen2_5_VLVisionConfig)


def pixels_per_token(hf_config: Any) -> int:
    """Height and width of the pixels that are merged into one image token."""
    return int(hf_config.vision_config.patch_size * hf_config.vision_config.spatial_merge_size)


def encode(tower: nn.Module, pictures: Sequence[UInt8[Tensor, "height width 3"]], hf_config: Any) -> TowerOutput:
    """Runs the tower over pictures of any sizes at once."""
    from transformers.vision_utils import get_vision_position_ids

    # Sizes stay on the host, where transformers asks for them.
    inputs, grids = merged_patches(pictures, hf_config.pixel_rule)
    positions = get_vision_position_ids(grids, hf_config.vision_config.spatial_merge_size)
    output = tower(
        inputs.to(next(tower.parameters()).dtype),
        grid_thw=grids,
        position_ids=positions.to(inputs.device, non_blocking=True),
    )
    return TowerOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))


def size_problems(flat: Any) -> list[str]:
    """Sizes of a flattened configuration that do not go together, a line each."""
    vision, problems = flat.vision_config, []
    for name in ("patch_size", "spatial_merge_size"):
        value = getattr(vision, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"vision_config.{name}: got {value!r}, expected a whole number from 1")
    if vision.out_hidden_size != flat.hidden_size:
        problems.append(
            f"vision_config.out_hidden_size: got {vision.out_hidden_size}, expected {flat.hidden_size}, the decoder's "
            "hidden_size"
        )
    return problems


_OUTER_FIELDS = field_names(
    "text_config vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id"
)
_TOWER_FIELDS = field_names(
    "depth hidden_act hidden_size in_channels initializer_range intermediate_size num_heads out_hidden_size patch_size "
    "rope_parameters spatial_merge_size temporal_patch_size"
)
_TOWER_FIXED = {"in_channels": (3,), "in_chans": (3,), "temporal_patch_size": (_FRAMES,)}

QWEN2_5_VL = VisionFamily(
    name="Qwen2.5-VL",
    decoder=dense.QWEN2,
    config_fields=ConfigFields(_OUTER_FIELDS, without_effect=field_names("vision_token_id")),
    tower_fields=ConfigFields(
        _TOWER_FIELDS | field_names("fullatt_block_indexes window_size"),
        _TOWER_FIXED,
        # Of films alone; and a second name of the patch size.
        field_names("tokens_per_second spatial_patch_size"),
    ),
    decoder_name=lambda name: name,
    prefixes={"vision.": "visual."},
    projector=("vision.merger.",),
    build=_build_qwen2_5,
    encode=encode,
    pixels_per_token=pixels_per_token,
    has_mrope=True,
    problems=size_problems,
)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen's vision-language families: Qwen2.5-VL, and Qwen3-VL with a dense decoder and with experts."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.models.families import decoder, dense, softmax_moe
from nemo_rl_moe.models.families.rules import ConfigFields, RuleTable, field_names, rule
from nemo_rl_moe.models.families.tower_shape import TowerShape
from nemo_rl_moe.models.families.vision import TowerOutput, VisionFamily, built_config
from nemo_rl_moe.models.image_patches import merged_patches

_FRAMES = 2
"""Number of frames of a patch. An image is a video of two equal frames."""


def build_tower(hf_config: Any) -> nn.Module:
    """Return transformers' vision tower for a flattened configuration. The tower includes the projector (`merger`)."""
    from transformers import CONFIG_MAPPING, AutoModel

    config_class = CONFIG_MAPPING[hf_config.model_type].sub_configs["vision_config"]
    tower: nn.Module = AutoModel.from_config(
        built_config(hf_config.vision_config, config_class), attn_implementation="sdpa", dtype=torch.float32
    )
    return tower


def pixels_per_token(hf_config: Any) -> int:
    """Return the side, in pixels, of an image token."""
    return int(hf_config.vision_config.patch_size * hf_config.vision_config.spatial_merge_size)


def tower_shape(hf_config: Any, *, is_gated: bool, num_mergers: int = 1) -> TowerShape:
    """Return the sizes of a tower with `num_mergers` equal mergers. The first of a merger's two matrices mixes a merged
    patch, and the second maps it to the decoder."""
    vision = hf_config.vision_config
    merged = vision.hidden_size * vision.spatial_merge_size**2
    return TowerShape(
        num_blocks=vision.depth,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        is_gated=is_gated,
        patch_dim=3 * _FRAMES * vision.patch_size**2,
        merge_size=vision.spatial_merge_size,
        projector_products=num_mergers * (merged**2 + merged * vision.out_hidden_size),
    )


def _qwen2_5_shape(hf_config: Any) -> TowerShape:
    vision = hf_config.vision_config
    # A window has a whole number of image tokens.
    tokens = vision.window_size // (vision.spatial_merge_size * vision.patch_size)
    return replace(
        tower_shape(hf_config, is_gated=True),
        window=tokens * vision.spatial_merge_size,
        num_window_blocks=vision.depth - len(set(vision.fullatt_block_indexes)),
    )


def encode(tower: nn.Module, images: Sequence[UInt8[Tensor, "height width 3"]], hf_config: Any) -> TowerOutput:
    """Run the tower over images of any sizes at once."""
    from transformers.vision_utils import get_vision_position_ids

    # transformers reads the sizes on the host.
    inputs, grids = merged_patches(images, hf_config.pixel_rule)
    positions = get_vision_position_ids(grids, hf_config.vision_config.spatial_merge_size)
    output = tower(
        inputs.to(next(tower.parameters()).dtype),
        grid_thw=grids,
        position_ids=positions.to(inputs.device, non_blocking=True),
        **_learned_positions(tower, grids, inputs.device),
    )
    return TowerOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))


def _learned_positions(tower: nn.Module, grids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the interpolation of Qwen3-VL's position table for each patch, computed on the host.

    Empty for a tower without a table.
    """
    if not hasattr(tower, "num_grid_per_side"):
        return {}
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    found = get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    names = ("interp_indices", "interp_weights")
    return {name: each.to(device, non_blocking=True) for name, each in zip(names, found, strict=True)}


def size_problems(flat: Any) -> list[str]:
    """Return a line for each inconsistent size of a flattened configuration."""
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


OUTER_FIELDS = field_names(
    "text_config vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id"
)
TOWER_FIELDS = field_names(
    "depth hidden_act hidden_size in_channels initializer_range intermediate_size num_heads out_hidden_size patch_size "
    "rope_parameters spatial_merge_size temporal_patch_size"
)
TOWER_FIXED = {"in_channels": (3,), "in_chans": (3,), "temporal_patch_size": (_FRAMES,)}

QWEN2_5_VL = VisionFamily(
    name="Qwen2.5-VL",
    decoder=dense.QWEN2,
    config_fields=ConfigFields(OUTER_FIELDS, without_effect=field_names("vision_token_id")),
    tower_fields=ConfigFields(
        TOWER_FIELDS | field_names("fullatt_block_indexes window_size"),
        TOWER_FIXED,
        # The first field is only for videos. The second is another name of the patch size.
        field_names("tokens_per_second spatial_patch_size"),
    ),
    decoder_name=lambda name: name,
    prefixes={"vision.": "visual."},
    projector=("vision.merger.",),
    build=build_tower,
    encode=encode,
    pixels_per_token=pixels_per_token,
    shape=_qwen2_5_shape,
    has_mrope=True,
    problems=size_problems,
)


def _num_deep_layers(hf_config: Any) -> int:
    return len(hf_config.vision_config.deepstack_visual_indexes or ())


def _qwen3_shape(hf_config: Any) -> TowerShape:
    return tower_shape(hf_config, is_gated=False, num_mergers=1 + _num_deep_layers(hf_config))


def _qwen3_problems(flat: Any) -> list[str]:
    """Return a line for each problem of sizes, blocks and the position table."""
    vision, problems = flat.vision_config, size_problems(flat)
    blocks, depth, entries = vision.deepstack_visual_indexes, vision.depth, vision.num_position_embeddings
    numbers = isinstance(blocks, list | tuple) and all(type(block) is int and 0 <= block < depth for block in blocks)
    if not numbers or list(blocks) != sorted(set(blocks)):
        problems.append(
            f"vision_config.deepstack_visual_indexes: got {shortened(repr(blocks))}, expected rising numbers of the "
            f"tower's blocks, from 0 to {depth - 1}"
        )
    elif len(blocks) > flat.num_hidden_layers:
        problems.append(
            f"vision_config.deepstack_visual_indexes: got {len(blocks)} blocks, expected at most "
            f"{flat.num_hidden_layers}, one for each layer of the decoder"
        )
    return [*problems, *position_table_problems(entries)]


def position_table_problems(entries: object) -> list[str]:
    """Return a line if a tower's position table is not square."""
    if type(entries) is int and entries >= 1 and math.isqrt(entries) ** 2 == entries:
        return []
    return [
        f"vision_config.num_position_embeddings: got {shortened(repr(entries))}, expected the square of a whole number"
    ]


def _qwen3_moe_fields(hf_config: Any) -> dict[str, Any]:
    # The decoder always normalises the weights of the chosen experts.
    always = copy.copy(hf_config)
    always.norm_topk_prob = True
    return softmax_moe.qwen3_moe_fields(always)


def _stacked_experts() -> RuleTable:
    """Return the rules with stacked experts as transformers writes them. Released files have them transposed."""
    names = [f"{decoder.LAYER}mlp.experts.{{expert}}.{linear}.weight" for linear in ("linear_fc1", "linear_fc2")]
    prefix = f"{decoder.HF_LAYER}mlp.experts"
    in_memory = decoder.stacked_swiglu_experts(prefix)
    released = decoder.stacked_swiglu_experts(prefix, is_transposed=True)
    experts = {
        name: rule(*own[0], alternatives=others) for name, own, others in zip(names, in_memory, released, strict=True)
    }
    return RuleTable({**decoder.DECODER, **decoder.QK_NORMS, **decoder.ROUTER, **experts})


_QWEN3_MOE_DECODER = replace(
    softmax_moe.QWEN3_MOE,
    transformer_fields=_qwen3_moe_fields,
    rules=_stacked_experts(),
    config_fields=replace(
        softmax_moe.QWEN3_MOE.config_fields,
        read=softmax_moe.QWEN3_MOE_READ_FIELDS - {"norm_topk_prob"},
        fixed={**softmax_moe.QWEN3_MOE_FIXED_FIELDS, "norm_topk_prob": (True,)},
    ),
    router_fields={**decoder.SOFTMAX_ROUTER_FIELDS, "moe_router_pre_softmax": None},
)

QWEN3_VL = VisionFamily(
    name="Qwen3-VL",
    decoder=dense.QWEN3,
    config_fields=ConfigFields(OUTER_FIELDS),
    tower_fields=ConfigFields(
        TOWER_FIELDS | field_names("deepstack_visual_indexes num_position_embeddings"), TOWER_FIXED
    ),
    decoder_name=lambda name: name.replace("model.", "model.language_model.", 1),
    prefixes={"vision.": "model.visual."},
    projector=("vision.merger.", "vision.deepstack_merger_list."),
    build=build_tower,
    encode=encode,
    pixels_per_token=pixels_per_token,
    shape=_qwen3_shape,
    has_mrope=True,
    interleaves_mrope=True,
    deep_layers=_num_deep_layers,
    problems=_qwen3_problems,
)
QWEN3_VL_MOE = replace(QWEN3_VL, name="Qwen3-VL-MoE", decoder=_QWEN3_MOE_DECODER)

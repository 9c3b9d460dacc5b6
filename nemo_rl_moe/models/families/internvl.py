# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""InternVL: tiles of one size, a projector, and a decoder of any text family with text positions."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from nemo_rl_moe.models.families.rules import ConfigFields, field_names
from nemo_rl_moe.models.families.tower_shape import TowerShape
from nemo_rl_moe.models.families.vision import TowerOutput, VisionFamily, built_config
from nemo_rl_moe.models.image_patches import tiles


class TowerAndProjector(nn.Module):
    def __init__(self, hf_config: Any):
        super().__init__()
        from transformers import AutoModel
        from transformers.models.internvl.configuration_internvl import InternVLVisionConfig
        from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

        vision = built_config(hf_config.vision_config, InternVLVisionConfig)
        self.vision_tower = AutoModel.from_config(vision, attn_implementation="sdpa", dtype=torch.float32)
        whole = SimpleNamespace(
            vision_config=vision,
            text_config=hf_config,
            downsample_ratio=hf_config.downsample_ratio,
            projector_hidden_act=hf_config.projector_hidden_act,
        )
        self.multi_modal_projector = InternVLMultiModalProjector(whole)

    def forward(
        self, inputs: Float[Tensor, "tiles 3 height width"], merge: int
    ) -> Float[Tensor, "tiles tokens hidden"]:
        states: Tensor = self.vision_tower(pixel_values=inputs).last_hidden_state[:, 1:]
        embeddings: Tensor = self.multi_modal_projector(pixel_shuffle(states, merge))
        return embeddings


def pixel_shuffle(states: Float[Tensor, "tiles patches size"], merge: int) -> Float[Tensor, "tiles tokens merged_size"]:
    """Return a token for each `merge` x `merge` square of patches, with their joined states, row by row.

    Tiles are square.
    """
    count, patches, size = states.shape
    side = round(patches**0.5)
    rows = side // merge
    blocks = states.view(count, rows, merge, rows, merge, size).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(count, rows * rows, merge * merge * size)


def _merge(hf_config: Any) -> int:
    return round(1 / hf_config.downsample_ratio)


def _pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value, value)


def pixels_per_token(hf_config: Any) -> int:
    """Return the side, in pixels, of an image token."""
    return int(_pair(hf_config.vision_config.patch_size)[0] * _merge(hf_config))


def _shape(hf_config: Any) -> TowerShape:
    vision, merge = hf_config.vision_config, _merge(hf_config)
    merged = vision.hidden_size * merge**2
    return TowerShape(
        num_blocks=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        is_gated=False,
        patch_dim=3 * _pair(vision.patch_size)[0] ** 2,
        merge_size=merge,
        projector_products=merged * hf_config.hidden_size + hf_config.hidden_size**2,
        num_class_tokens=1,
    )


def _encode(tower: nn.Module, images: Sequence[UInt8[Tensor, "height width 3"]], hf_config: Any) -> TowerOutput:
    inputs = tiles(images, hf_config.pixel_rule).to(next(tower.parameters()).dtype)
    return TowerOutput(tower(inputs, _merge(hf_config)).flatten(0, 1))


def _problems(flat: Any) -> list[str]:
    """Return a line for each inconsistent size."""
    vision, ratio = flat.vision_config, flat.downsample_ratio
    problems = []
    if not isinstance(ratio, float | int) or ratio <= 0 or ratio > 1 or abs(1 / ratio - round(1 / ratio)) > 1e-9:
        problems.append(f"downsample_ratio: got {ratio!r}, expected 1 divided by a whole number, such as 0.5")
        return problems
    for name in ("image_size", "patch_size"):
        sides = _pair(getattr(vision, name))
        if len(sides) != 2 or len(set(sides)) != 1 or type(sides[0]) is not int or sides[0] < 1:
            problems.append(f"vision_config.{name}: got {getattr(vision, name)!r}, expected the side of a square")
            return problems
    size, unit = _pair(vision.image_size)[0], pixels_per_token(flat)
    if size % unit:
        problems.append(
            f"vision_config.image_size: got {size}, expected a multiple of {unit}, patch_size / downsample_ratio"
        )
    return problems


_OUTER_FIELDS = field_names(
    "text_config vision_config image_token_id downsample_ratio projector_hidden_act vision_feature_layer "
    "vision_feature_select_strategy"
)
_TOWER_FIELDS = field_names(
    "attention_bias attention_dropout hidden_act hidden_dropout_prob hidden_size image_size initializer_range "
    "intermediate_size layer_norm_eps layer_scale_init_value norm_type num_attention_heads num_channels "
    "num_hidden_layers patch_size projection_dropout use_absolute_position_embeddings use_mean_pooling use_qk_norm"
)

INTERNVL = VisionFamily(
    name="InternVL",
    decoder=None,
    config_fields=ConfigFields(
        _OUTER_FIELDS,
        {"vision_feature_layer": (-1,), "vision_feature_select_strategy": ("default",)},
        # The number of tokens of a tile follows from its size.
        field_names("image_seq_length"),
    ),
    tower_fields=ConfigFields(
        _TOWER_FIELDS,
        {
            "attention_dropout": (0.0,),
            "hidden_dropout_prob": (0.0,),
            "num_channels": (3,),
            "projection_dropout": (0.0,),
            "use_absolute_position_embeddings": (True,),
            "use_mask_token": (False,),
        },
    ),
    decoder_name=lambda name: f"language_model.{name}",
    prefixes={"vision.vision_tower.": "vision_tower.", "vision.multi_modal_projector.": "multi_modal_projector."},
    projector=("vision.multi_modal_projector.",),
    build=TowerAndProjector,
    encode=_encode,
    pixels_per_token=pixels_per_token,
    shape=_shape,
    problems=_problems,
)

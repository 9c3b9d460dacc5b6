# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of towers against what torch counts while transformers' modules run."""

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nemo_rl_moe.config.schema_policy import FreezeConfig
from nemo_rl_moe.models.families import VISION_FAMILIES, decoder_type_of
from nemo_rl_moe.models.families.vision import VisionFamily
from nemo_rl_moe.models.image_patches import PixelRule
from tests.support.vision_models import MEAN, MERGE, MODELS, PATCH, SIDE, STD, tiny_vision_config

SIZES = {
    # Windows of two image tokens: whole ones, and some that are cut by the image's edge.
    "qwen2_5_vl": ([(4, 4)], [(3, 5), (2, 2), (1, 4)]),
    "qwen3_vl_moe": ([(4, 4)], [(3, 5), (2, 2), (1, 4)]),
    "qwen3_5_moe": ([(4, 4)], [(3, 5), (2, 2), (1, 4)]),
    "internvl": ([(4, 4)], [(4, 4)] * 3),
}
"""Rows and columns of image tokens of images that run together."""
CASES = [(model_type, sizes) for model_type in MODELS for sizes in SIZES[model_type]]
ALL_TRAIN = FreezeConfig(vision_tower=False, projector=False, language_model=False)


@cache
def tower_of(model_type: str) -> tuple[VisionFamily, Any, torch.nn.Module]:
    family, config = VISION_FAMILIES[model_type], tiny_vision_config(model_type)
    flat = family.flattened(config, decoder_type_of(config.to_dict()))
    frames = 1 if model_type == "internvl" else 2
    flat.pixel_rule = PixelRule(tuple(MEAN), tuple(STD), 1 / 255, PATCH, MERGE, frames)
    return family, flat, family.build(flat)


def run(model_type: str, sizes: list[tuple[int, int]]) -> None:
    family, flat, tower = tower_of(model_type)
    images = [torch.zeros(rows * SIDE, columns * SIDE, 3, dtype=torch.uint8) for rows, columns in sizes]
    output = family.encode(tower, images, flat)
    assert len(output.embeddings) == sum(rows * columns for rows, columns in sizes)


def grids_of(model_type: str, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    family, flat, _ = tower_of(model_type)
    return [family.patch_grid(flat, rows * SIDE, columns * SIDE) for rows, columns in sizes]


@pytest.mark.parametrize(("model_type", "sizes"), CASES)
def test_operations_are_those_that_torch_counts(model_type: str, sizes: list[tuple[int, int]]) -> None:
    # Attention in its own products, which the counter knows; a fused kernel for CPUs it does not.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(model_type, sizes)
    family, flat, _ = tower_of(model_type)
    shape = family.shape(flat)
    found = [shape.forward_flops(*grid) for grid in grids_of(model_type, sizes)]
    assert counter.get_total_flops() == sum(map(sum, found))
    of_projector = re.compile(r".*\.(merger|deepstack_merger_list\.\d+|multi_modal_projector)")
    by_module = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    measured = sum(flops for name, flops in by_module.items() if of_projector.fullmatch(name))
    assert measured == sum(projector for _, projector in found)


def test_training_counts_what_is_trained() -> None:
    family, flat, _ = tower_of("qwen2_5_vl")
    shape, grids = family.shape(flat), [(4, 4), (2, 6)]
    towers, projectors = (sum(each) for each in zip(*(shape.forward_flops(*grid) for grid in grids), strict=True))
    cases = {(False, False): (3, 3), (True, False): (1, 2), (False, True): (3, 2), (True, True): (1, 1)}
    for (no_tower, no_projector), (of_tower, of_projector) in cases.items():
        freeze = ALL_TRAIN.model_copy(update={"vision_tower": no_tower, "projector": no_projector})
        assert shape.training_flops(grids, freeze) == of_tower * towers + of_projector * projectors
    assert shape.training_flops([], ALL_TRAIN) == 0


@pytest.mark.parametrize(("model_type", "sizes"), CASES)
def test_towers_keep_no_less_for_the_backward_pass(model_type: str, sizes: list[tuple[int, int]]) -> None:
    """And not twice as much; by twice the patches twice as much. Weights, which are kept as well, do not count."""
    family, flat, tower = tower_of(model_type)
    weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run(model_type, sizes)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    patches = sum(rows * columns for rows, columns in grids_of(model_type, sizes))
    at_least = family.shape(flat).activations_at_least(patches, 4)
    assert at_least <= num_bytes <= 2 * at_least


def test_activations_of_four_times_the_hidden_size_are_those_of_the_paper() -> None:
    """34 bytes but for two dropout masks of a byte, of a number of two bytes."""
    family, flat, _ = tower_of("internvl")
    shape = family.shape(flat)
    plain = type(shape)(**{**vars(shape), "intermediate_size": 4 * shape.hidden_size})
    assert plain.activations_at_least(5, 2) == 5 * shape.num_blocks * shape.hidden_size * (34 - 2)

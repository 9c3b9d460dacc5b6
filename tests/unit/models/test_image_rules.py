# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes and numbers of images: those of transformers' own image processors."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.image_patches import PixelRule, as_tensors, merged_patches, tiles
from nemo_rl_moe.models.image_rules import (
    ImageRule,
    ImageSizeError,
    PatchSizes,
    TileSizes,
    image_problem,
    load_image_rule,
)

COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 64},
    **COLOURS,
}
OF_QWEN = SimpleNamespace(
    vision_config=SimpleNamespace(patch_size=4, temporal_patch_size=2, spatial_merge_size=2), image_token_id=1
)
INTERNVL = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": {"height": 16, "width": 16},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 6,
    **COLOURS,
}
OF_INTERNVL = SimpleNamespace(
    vision_config=SimpleNamespace(patch_size=[4, 4], image_size=[16, 16]), image_token_id=1, downsample_ratio=0.5
)


def rule_of(folder: Path, values: Mapping[str, Any], hf_config: Any) -> ImageRule:
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    found = load_image_rule(str(folder), hf_config)
    assert found is not None
    return found


@pytest.fixture
def rule(tmp_path: Path) -> ImageRule:
    return rule_of(tmp_path, QWEN, OF_QWEN)


def images(number: int, longest: int) -> list[Image.Image]:
    rng = np.random.default_rng(3)
    sizes = [(8, 8), (16, 16), (12, 20), (20, 12), *rng.integers(8, longest, (number, 2)).tolist()]
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def test_patches_are_those_of_transformers_to_the_last_bit(rule: ImageRule) -> None:
    processor = Qwen2VLImageProcessorPil(**{name: QWEN[name] for name in QWEN if name != "image_processor_type"})
    for image in images(60, 130):
        expected = processor(images=[image], return_tensors="pt")
        found, grid = merged_patches(as_tensors(rule.model_images(image)), rule.pixels)
        assert torch.equal(found, expected["pixel_values"])
        assert torch.equal(grid, expected["image_grid_thw"])
        assert rule.num_tokens(image.height, image.width) == int(grid.prod()) // 4


def test_patches_of_several_images_follow_each_other(rule: ImageRule) -> None:
    model_images = [model_image for image in images(3, 60) for model_image in rule.model_images(image)]
    singly = [merged_patches(as_tensors([model_image]), rule.pixels) for model_image in model_images]
    found, grid = merged_patches(as_tensors(model_images), rule.pixels)
    assert torch.equal(found, torch.cat([patches for patches, _ in singly]))
    assert torch.equal(grid, torch.cat([grid for _, grid in singly]))
    nothing, no_grid = merged_patches([], rule.pixels)
    assert nothing.shape == (0, rule.pixels.patch_dim)
    assert no_grid.shape == (0, 3)


@pytest.mark.parametrize(("least", "most"), [(1, 6), (2, 5), (1, 1)])
def test_tiles_are_those_of_transformers_to_the_last_bit(tmp_path: Path, least: int, most: int) -> None:
    values = INTERNVL | {"min_patches": least, "max_patches": most}
    rule = rule_of(tmp_path, values, OF_INTERNVL)
    # InternVL's processor asks for tiles whatever the image processor's own file says.
    own = {name: values[name] for name in values if name not in ("image_processor_type", "crop_to_patches")}
    processor = GotOcr2ImageProcessorPil(**own, crop_to_patches=True)
    for image in images(60, 90):
        expected = processor(images=[image], return_tensors="pt")
        found = tiles(as_tensors(rule.model_images(image)), rule.pixels)
        assert torch.equal(found, expected["pixel_values"])
        # (16 / 4 * 0.5) ** 2 tokens a tile
        assert rule.num_tokens(image.height, image.width) == 4 * int(expected["num_patches"][0])


def test_a_image_of_the_rules_own_size_keeps_its_bytes(rule: ImageRule) -> None:
    """An engine that resizes what it gets leaves it alone."""
    for image in images(20, 130):
        (model_image,) = rule.model_images(image)
        (again,) = rule.model_images(Image.fromarray(model_image.pixels))
        assert np.array_equal(model_image.pixels, again.pixels)


def test_an_image_far_longer_than_high_is_refused(rule: ImageRule) -> None:
    with pytest.raises(ImageSizeError, match="8 x 1608 pixels, expected no side more than 200 times the other"):
        rule.num_tokens(8, 1608)
    assert rule.num_tokens(8, 1600) > 0


def test_fields_inside_the_processors_file_win(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN | {"image_mean": [0.5] * 3}}))
    assert rule_of(tmp_path, QWEN, OF_QWEN).pixels.mean == (0.5, 0.5, 0.5)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    assert rule_of(tmp_path, QWEN, OF_QWEN).pixels.mean == tuple(COLOURS["image_mean"])


def test_older_files_name_their_limits_otherwise(tmp_path: Path) -> None:
    older = {name: QWEN[name] for name in QWEN if name != "size"} | {"min_pixels": 256, "max_pixels": 48 * 64}
    assert rule_of(tmp_path, older, OF_QWEN) == rule_of(tmp_path, QWEN, OF_QWEN)


def test_a_model_of_text_needs_no_rule(tmp_path: Path) -> None:
    assert load_image_rule(str(tmp_path), SimpleNamespace(model_type="qwen3_moe")) is None


@pytest.mark.parametrize(
    ("change", "hf_config", "problem"),
    [
        ({"patch_size": 14}, OF_QWEN, "patch_size: got 14, expected 4, as the model's vision_config says"),
        ({"merge_size": "2"}, OF_QWEN, "merge_size: got '2', expected a whole number from 1 on"),
        ({"do_rescale": False}, OF_QWEN, "do_rescale: got False, expected true"),
        ({"image_std": [1, 1, 0]}, OF_QWEN, "image_std: got .*, expected three numbers"),
        ({"rescale_factor": 0}, OF_QWEN, "rescale_factor: got 0, expected a number above 0"),
        ({"size": {"shortest_edge": 64, "longest_edge": 63}}, OF_QWEN, "got 63, expected at least 64"),
        ({"size": {"height": 4}}, OF_QWEN, "min_pixels or size.shortest_edge: got None, expected a number of pixels"),
        ({"image_processor_type": "CLIPImageProcessor"}, OF_QWEN, "expected Qwen2VLImageProcessor or GotOcr2"),
        (INTERNVL | {"size": {"height": 8, "width": 16}}, OF_INTERNVL, "size: got .*, expected height 16 and width 16"),
        (INTERNVL | {"min_patches": 7}, OF_INTERNVL, "max_patches: got 6, expected at least 7, which is min_patches"),
    ],
)
def test_a_rule_that_does_not_go_with_the_model_is_an_error(
    tmp_path: Path, change: dict[str, Any], hf_config: Any, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        rule_of(tmp_path, QWEN | change, hf_config)


def test_missing_and_broken_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no preprocessor_config.json"):
        load_image_rule(str(tmp_path), OF_QWEN)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"preprocessor_config.json cannot be read"):
        load_image_rule(str(tmp_path), OF_QWEN)


def test_a_model_beside_the_policy_takes_its_images_as_they_are() -> None:
    pixels = PixelRule((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, 14, 2, 2)
    patches = ImageRule(PatchSizes(28, 100, 1000), 3, pixels, 60)
    tiles = ImageRule(TileSizes((32, 32), 1, 12, 16), 3, pixels, 60)
    for rule in (None, patches, tiles):
        assert image_problem(rule, rule) is None
    # How many pixels a policy makes of an image is its own affair.
    assert image_problem(replace(patches, sizes=PatchSizes(28, 7, 9), resample=2), patches) is None
    assert image_problem(replace(tiles, sizes=TileSizes((32, 32), 1, 1, 16)), tiles) is None
    assert image_problem(None, tiles) == "takes text alone"
    assert image_problem(tiles, None) == "takes images, but the policy takes text alone"
    for own, policys in (
        (patches, tiles),
        (tiles, patches),
        (replace(patches, token_id=61), patches),
        (replace(patches, sizes=PatchSizes(32, 100, 1000)), patches),
        (replace(tiles, sizes=TileSizes((32, 64), 1, 12, 16)), tiles),
        (replace(tiles, sizes=TileSizes((32, 32), 1, 12, 4)), tiles),
    ):
        assert image_problem(own, policys) == "takes images in other sizes, or as other tokens"

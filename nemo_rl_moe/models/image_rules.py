# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Image sizes that a model takes, by its image processor's files: one image in patches, or tiles of one size.

Rules and resized bytes (by Pillow) are the same as in transformers' `Qwen2VLImageProcessor` (Qwen2-VL to Qwen3-VL) and
`GotOcr2ImageProcessor` (InternVL).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import load_model_json
from nemo_rl_moe.models.image_patches import PixelRule
from nemo_rl_moe.models.images import ModelImage
from nemo_rl_moe.models.model_files import PREPROCESSOR_CONFIG_FILE, PROCESSOR_CONFIG_FILE

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_ASPECT_RATIO = 200
"""Largest aspect ratio that Qwen's image processor accepts."""
Size = tuple[int, int]
"""Height and width in pixels."""


class ImageSizeError(ValueError):
    """An image size that the model does not support. The message has the reason, but not the image's location."""


@dataclass(frozen=True)
class PatchSizes:
    """Rule for the size of an image that is not cut into tiles.

    Both sides are multiples of `unit`, which is the side of an image token in pixels.
    """

    unit: int
    min_pixels: int
    max_pixels: int

    def sizes(self, height: int, width: int) -> list[Size]:
        if max(height, width) > MOST_ASPECT_RATIO * min(height, width):
            raise ImageSizeError(
                f"{height} x {width} pixels, expected no side more than {MOST_ASPECT_RATIO} times the other"
            )
        unit = self.unit
        # Like the published rule, Python rounds halves to even.
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return [(rows * unit, columns * unit)]

    def num_tokens(self, height: int, width: int) -> int:
        return sum(rows * columns // self.unit**2 for rows, columns in self.sizes(height, width))

    def model_images(self, image: "Image", resample: int) -> list[ModelImage]:
        (size,) = self.sizes(image.height, image.width)
        return [_resized(image, size, resample)]


@dataclass(frozen=True)
class TileSizes:
    """Rule that cuts an image into equal tiles: a grid with about the image's aspect ratio.

    If the grid has several tiles, the full image is one more tile.

    Attributes:
        max_tiles: Maximum number of tiles of the grid. With 1, the full image is the only tile.
        tokens: Number of image tokens of a tile.
    """

    size: Size
    min_tiles: int
    max_tiles: int
    tokens: int

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return columns and rows of the grid with the nearest aspect ratio.

        Of equally near grids, the larger grid is chosen if the image has more than half of that grid's pixels.
        """
        if self.max_tiles == 1:
            return 1, 1
        most = range(1, self.max_tiles + 1)
        grids = [(columns, rows) for columns in most for rows in most]
        grids = [grid for grid in grids if self.min_tiles <= grid[0] * grid[1] <= self.max_tiles]
        best, smallest = (1, 1), math.inf
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            difference = abs(width / height - columns / rows)
            fills = height * width > 0.5 * self.size[0] * self.size[1] * columns * rows
            if difference < smallest or (difference == smallest and fills):
                best, smallest = (columns, rows), difference
        return best

    def sizes(self, height: int, width: int) -> list[Size]:
        columns, rows = self.grid(height, width)
        return [self.size] * (columns * rows + (columns * rows > 1))

    def num_tokens(self, height: int, width: int) -> int:
        return self.tokens * len(self.sizes(height, width))

    def model_images(self, image: "Image", resample: int) -> list[ModelImage]:
        columns, rows = self.grid(image.height, image.width)
        height, width = self.size
        whole = _resized(image, (height * rows, width * columns), resample).pixels
        cut = whole.reshape(rows, height, columns, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
        found = [ModelImage(np.ascontiguousarray(tile)) for tile in cut]
        return found if len(found) == 1 else [*found, _resized(image, self.size, resample)]


def _resized(image: "Image", size: Size, resample: int) -> ModelImage:
    height, width = size
    return ModelImage(np.array(image.resize((width, height), resample=resample)))


@dataclass(frozen=True)
class ImageRule:
    """Rule that converts an image to a model's input.

    Attributes:
        resample: Pillow's number of the resampling filter.
        token_id: Id of the image token. A chat template inserts one image token for each image.
    """

    sizes: PatchSizes | TileSizes
    resample: int
    pixels: PixelRule
    token_id: int

    def num_tokens(self, height: int, width: int) -> int:
        return self.sizes.num_tokens(height, width)

    def model_images(self, image: "Image") -> list[ModelImage]:
        return self.sizes.model_images(image, self.resample)

    def takes_those_of(self, other: "ImageRule") -> bool:
        """Return whether a model with this rule accepts another rule's images and image tokens."""
        mine, theirs = self.sizes, other.sizes
        if isinstance(mine, PatchSizes):
            is_same = isinstance(theirs, PatchSizes) and mine.unit == theirs.unit
        else:
            is_same = isinstance(theirs, TileSizes) and (mine.size, mine.tokens) == (theirs.size, theirs.tokens)
        return is_same and self.token_id == other.token_id


def image_problem(own: ImageRule | None, policys: ImageRule | None) -> str | None:
    """Return why a model with the rule `own` cannot read the images in the policy's batches, or None if it can.

    A text model has the rule None.
    """
    if own is None and policys is not None:
        return "takes text alone"
    if own is not None and policys is None:
        return "takes images, but the policy takes text alone"
    if own is not None and policys is not None and not own.takes_those_of(policys):
        return "takes images in other sizes, or as other tokens"
    return None


_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3
_ALWAYS_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_PATCHES, _TILES = "Qwen2VLImageProcessor", "GotOcr2ImageProcessor"
_KEY = "policy.model_name"


def load_image_rule(model_name: str, hf_config: Any) -> ImageRule | None:
    """Return the rule from a model's files, or None for a text model.

    As in transformers, `image_processor` of `processor_config.json` takes precedence over `preprocessor_config.json`.
    """
    if getattr(hf_config, "vision_config", None) is None:
        return None
    file = PROCESSOR_CONFIG_FILE
    found = (load_model_json(model_name, file) or {}).get("image_processor")
    if found is None:
        file = PREPROCESSOR_CONFIG_FILE
        found = load_model_json(model_name, file)
    if found is None:
        raise ConfigurationError(
            f"{_KEY}: {model_name} is a model of images and text, but holds no {PREPROCESSOR_CONFIG_FILE}: expected"
            " this file with the sizes of images that the model takes"
        )
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{_KEY}: {file}: got {shortened(repr(found))}, expected an object")
    return _Fields(file, found).rule(hf_config)


@dataclass(frozen=True)
class _Fields:
    file: str
    values: Mapping[str, Any]

    def rule(self, hf_config: Any) -> ImageRule:
        for name in _ALWAYS_ON:
            if self.values.get(name, True) is False:
                raise self._error(name, False, "true")
        kind = str(self.values.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
        vision, token_id = hf_config.vision_config, hf_config.image_token_id
        downsample_ratio = getattr(hf_config, "downsample_ratio", None)
        resample = self._whole("resample", _BICUBIC, least=0)
        if kind == _PATCHES:
            return ImageRule(self._patch_sizes(vision), resample, self._pixels(vision), token_id)
        if kind == _TILES:
            return ImageRule(self._tile_sizes(vision, downsample_ratio), resample, self._pixels(vision), token_id)
        raise self._error("image_processor_type", self.values.get("image_processor_type"), f"{_PATCHES} or {_TILES}")

    def _patch_sizes(self, vision: Any) -> PatchSizes:
        sides = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
        of_model = {"merge_size": "spatial_merge_size"}
        for name, default in sides.items():
            sides[name] = self._whole(name, default)
            expected = getattr(vision, of_model.get(name, name))
            if sides[name] != expected:
                raise self._error(name, sides[name], f"{expected}, as the model's vision_config says")
        size = self.values.get("size") or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        if not isinstance(size, Mapping):
            raise self._error("size", size, "an object with shortest_edge and longest_edge")
        limits = []
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            value = size.get(edge) if self.values.get(name) is None else self.values[name]
            if not _is_whole(value, 1):
                raise self._error(f"{name} or size.{edge}", value, "a number of pixels")
            assert isinstance(value, int)
            limits.append(value)
        unit = sides["patch_size"] * sides["merge_size"]
        if limits[1] < max(limits[0], unit**2):
            raise self._error("max_pixels or size.longest_edge", limits[1], f"at least {max(limits[0], unit**2)}")
        return PatchSizes(unit, limits[0], limits[1])

    def _tile_sizes(self, vision: Any, downsample_ratio: float | None) -> TileSizes:
        size = self.values.get("size") or {"height": 384, "width": 384}
        expected = _pair(vision.image_size)
        found = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else size
        if found != expected:
            raise self._error(
                "size", size, f"height {expected[0]} and width {expected[1]}, as the model's vision_config says"
            )
        patches = [side // patch for side, patch in zip(expected, _pair(vision.patch_size), strict=True)]
        rows, columns = (int(count * (downsample_ratio or 1.0)) for count in patches)
        least, most = self._whole("min_patches", 1), self._whole("max_patches", 12)
        if least > most:
            raise self._error("max_patches", most, f"at least {least}, which is min_patches")
        return TileSizes(expected, least, most, rows * columns)

    def _pixels(self, vision: Any) -> PixelRule:
        scale = self.values.get("rescale_factor", 1 / 255)
        if not _is_number(scale):
            raise self._error("rescale_factor", scale, "a number above 0")
        patch_size = _pair(vision.patch_size)[0]
        return PixelRule(
            self._colours("image_mean", _CLIP_MEAN, least=-math.inf),
            self._colours("image_std", _CLIP_STD),
            float(scale),
            patch_size,
            int(getattr(vision, "spatial_merge_size", 1)),
            int(getattr(vision, "temporal_patch_size", 1)),
        )

    def _colours(self, name: str, default: tuple[float, ...], least: float = 0.0) -> tuple[float, float, float]:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(_is_number(one, least) for one in value):
            raise self._error(name, value, "three numbers, of red, green and blue")
        red, green, blue = map(float, value)
        return red, green, blue

    def _whole(self, name: str, default: int, least: int = 1) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not _is_whole(value, least):
            raise self._error(name, value, f"a whole number from {least} on")
        return int(value)

    def _error(self, name: str, value: object, expected: str) -> ConfigurationError:
        return ConfigurationError(f"{_KEY}: {self.file}: {name}: got {shortened(repr(value))}, expected {expected}")


def _is_number(value: object, above: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _pair(value: int | list[int] | tuple[int, int]) -> Size:
    """Return height and width from a field that may be a single number."""
    first, second = (value, value) if isinstance(value, int) else value
    return first, second

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a vision tower from the bytes of images: normalised, in patches (Qwen's towers) or as tiles.

The inputs are bitwise equal to the outputs of transformers' image processors with Pillow and NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from nemo_rl_moe.models.images import ModelImage


@dataclass(frozen=True)
class PixelRule:
    """Normalisation of bytes, `(byte * scale - mean) / std`, and the sizes of patches.

    Attributes:
        merge_size: Side, in patches, of the block that becomes one image token. Unused for tiles.
        frames: Number of equal frames by which a video tower represents an image.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    scale: float
    patch_size: int
    merge_size: int
    frames: int

    @property
    def patch_dim(self) -> int:
        return 3 * self.frames * self.patch_size**2

    def normalised(self, pixels: UInt8[Tensor, "... 3"]) -> Float[Tensor, "... 3"]:
        """Return normalised pixels in float32. They are scaled in float64 before rounding, as NumPy does."""
        scaled = (pixels.double() * self.scale).float()
        mean, std = _filled(self.mean, scaled), _filled(self.std, scaled)
        return (scaled - mean) / std


def _filled(values: tuple[float, ...], like: Tensor) -> Float[Tensor, " colours"]:
    """Return numbers on the device of the tensor `like`, without a synchronising copy from the host."""
    return torch.stack([like.new_full((), value) for value in values])


def merged_patches(
    images: Sequence[UInt8[Tensor, "height width 3"]], rule: PixelRule
) -> tuple[Float[Tensor, "patches dim"], Int[Tensor, "images 3"]]:
    """Cut images into patches, in order.

    A block of `merge_size` x `merge_size` patches becomes one token. The patches of a block come one after another.
    Blocks, and the patches in a block, come row by row. A patch is `[3, frames, patch_size, patch_size]`, flattened.

    Args:
        images: Images whose sides are multiples of `patch_size * merge_size`. There may be none.

    Returns:
        The patches in float32, and (1, height, width) of each image in patches, on the CPU.
    """
    patch, merge = rule.patch_size, rule.merge_size
    flat, grids = [], []
    for image in images:
        height, width, _ = image.shape
        grids.append((1, height // patch, width // patch))
        numbers = rule.normalised(image).view(
            height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3
        )
        # New order: blocks down and across, patches of a block down and across, colour, pixels down and across.
        numbers = numbers.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
        flat.append(numbers.expand(*numbers.shape[:5], rule.frames, patch, patch).reshape(-1, rule.patch_dim))
    grid = torch.tensor(grids, dtype=torch.long).view(-1, 3)
    return torch.cat(flat) if flat else torch.zeros(0, rule.patch_dim), grid


def tiles(images: Sequence[UInt8[Tensor, "height width 3"]], rule: PixelRule) -> Float[Tensor, "tiles 3 height width"]:
    return rule.normalised(torch.stack(list(images))).permute(0, 3, 1, 2).contiguous()


def as_tensors(images: Sequence[ModelImage]) -> list[UInt8[Tensor, "height width 3"]]:
    """Return the images as tensors, without a copy."""
    return [torch.from_numpy(image.pixels) for image in images]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images of token sequences: sent as bytes, and cut into patches only where the model runs.

A sequence of a vision-language model always has all four inputs. Without images the inputs are empty, so that sequences
with and without images can share a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice

import numpy as np
from jaxtyping import Bool, UInt8

from nemo_rl_moe.distributed.batch import Axis, ModelInput, TokenBatch
from nemo_rl_moe.distributed.shared_arrays import SharedColumn, num_bytes_of

PIXELS = "pixels"
"""Column (shared, `[bytes]`): RGB bytes of each image, row by row. On a device, a microbatch has the concatenated bytes
of its distinct images on ranks with a vision tower, and none on other ranks."""
IMAGE_SIZES = "image_sizes"
"""Column (ragged, `[images, 2]`): height and width of each image in pixels."""
IMAGE_IDS = "image_ids"
"""Column (ragged, `[images]`): a digest of each image. Equal images pass the vision tower once per microbatch."""
IS_IMAGE = "is_image"
"""Column: True for the prompt's image tokens, in the order of the images. In a response, the same token id is an
ordinary token."""

ON_HOST = frozenset({IMAGE_SIZES, IMAGE_IDS})
"""Columns that a model reads on the host, to compute sizes. The other columns are on the model's device."""


@dataclass(frozen=True)
class ModelImage:
    """An image or a tile, resized for the model but not normalised.

    Attributes:
        pixels: RGB, `[height, width, 3]`. Both sides are multiples of the side of an image token.
    """

    pixels: UInt8[np.ndarray, "height width 3"]

    @cached_property
    def flat(self) -> UInt8[np.ndarray, " bytes"]:
        """The flattened pixels. The object is always the same, so that sequences share it."""
        return self.pixels.reshape(-1)

    @cached_property
    def digest(self) -> int:
        """A 63-bit digest of size and pixels."""
        found = blake2b(repr(self.pixels.shape).encode(), digest_size=8)
        found.update(self.pixels.tobytes())
        return int.from_bytes(found.digest(), "big") >> 1


def image_inputs(images: Sequence[ModelImage], is_image: Bool[np.ndarray, " tokens"]) -> dict[str, ModelInput]:
    """Return the model's inputs of one sequence. `is_image` marks its image tokens. Tokens beyond the mask are text."""
    sizes = np.array([image.pixels.shape[:2] for image in images], dtype=np.int64).reshape(-1, 2)
    digests = np.array([image.digest for image in images], dtype=np.int64)
    return {
        PIXELS: ModelInput(tuple(image.flat for image in images), Axis.SHARED),
        IMAGE_SIZES: ModelInput(sizes, Axis.RAGGED),
        IMAGE_IDS: ModelInput(digests, Axis.RAGGED),
        IS_IMAGE: ModelInput(np.asarray(is_image, dtype=np.bool_), Axis.TOKEN, fill=False),
    }


def images_in(inputs: Mapping[str, ModelInput]) -> list[ModelImage]:
    """Return the images of one sequence. Their pixels must be in memory."""
    if PIXELS not in inputs:
        return []
    sizes = inputs[IMAGE_SIZES].values.tolist()
    return [ModelImage(flat.reshape(*size, 3)) for flat, size in zip(inputs[PIXELS].values, sizes, strict=True)]


def has_its_pixels(inputs: Mapping[str, ModelInput]) -> bool:
    """Return whether each image has a digest, and a pixel array with as many bytes as its size requires."""
    sizes = inputs[IMAGE_SIZES].values
    found = [num_bytes_of(array) for array in inputs[PIXELS].values]
    return len(inputs[IMAGE_IDS].values) == len(sizes) and found == (3 * sizes.prod(1)).tolist()


def image_patches(batch: TokenBatch, num_patches: Callable[[int, int], int] | None) -> list[dict[int, int]]:
    """Return, for each sequence, digest of an image -> its number of patches. Empty for a batch without images.

    Args:
        num_patches: Function of height and width in pixels that returns an image's number of patches. None for a text
            model.
    """
    if num_patches is None or IMAGE_IDS not in batch.columns:
        return []
    ids, sizes = batch.columns[IMAGE_IDS], batch.columns[IMAGE_SIZES]
    assert ids.sizes is not None
    patches = [num_patches(height, width) for height, width in sizes.values.tolist()]
    pairs = iter(zip(ids.values.tolist(), patches, strict=True))
    return [dict(islice(pairs, number)) for number in ids.sizes.tolist()]


def distinct_images(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the position of each distinct id's first occurrence, and each id's index among the distinct ids."""
    first: dict[int, int] = {}
    for position, digest in enumerate(ids):
        first.setdefault(digest, position)
    index = {digest: number for number, digest in enumerate(first)}
    return list(first.values()), [index[digest] for digest in ids]


def distinct_sizes(batch: TokenBatch) -> list[tuple[int, int]]:
    """Return height and width in pixels of a batch's distinct images. The list is empty for a text model."""
    if IMAGE_IDS not in batch.columns:
        return []
    chosen, _ = distinct_images(batch.columns[IMAGE_IDS].values.tolist())
    return [(int(height), int(width)) for height, width in batch.columns[IMAGE_SIZES].values[chosen].tolist()]


def distinct_pixels(pixels: SharedColumn, ids: Sequence[int]) -> UInt8[np.ndarray, " bytes"]:
    arrays = [array for of_sequence in pixels.arrays for array in of_sequence]
    chosen, _ = distinct_images(ids)
    return np.concatenate([np.zeros(0, np.uint8), *(arrays[position] for position in chosen)])


def sequence_inputs(batch: TokenBatch, rows: Sequence[int]) -> list[dict[str, ModelInput]]:
    """Return the model's inputs of some rows of a batch, as they were before collation. Empty for a text model."""
    found: list[dict[str, ModelInput]] = []
    for row in rows if PIXELS in batch.shared else ():
        one = batch.select([row])
        inputs = {PIXELS: ModelInput(one.shared[PIXELS].arrays[0], Axis.SHARED)}
        for name in (IMAGE_SIZES, IMAGE_IDS, IS_IMAGE):
            column = one.columns[name]
            values = column.values.cpu().numpy()
            is_ragged = column.axis is Axis.RAGGED
            inputs[name] = ModelInput(values if is_ragged else values[0], column.axis, column.fill)
        found.append(inputs)
    return found

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images beside token sequences: transported as bytes, and cut into patches only where the model runs.

A sequence of a vision-language model always has all four inputs, empty without images, so that sequences with and
without images make one batch.
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
"""Column: of each picture red, green and blue of its pixels, row by row, as bytes; shared, `[bytes]`. A microbatch on a
device has those of its distinct pictures, one after another, where the vision tower is, and nothing elsewhere."""
PICTURE_SIZES = "picture_sizes"
"""Column: height and width of each picture in pixels; ragged, `[pictures, 2]`."""
PICTURE_IDS = "picture_ids"
"""Column: a digest of each picture: equal ones go through the vision tower once a microbatch; ragged, `[pictures]`."""
IS_IMAGE = "is_image"
"""Column: True for the prompt's tokens that stand for a piece of a picture, in the order of the pictures. A response
may hold the same token id, which then is a token as any other."""

ON_HOST = frozenset({PICTURE_SIZES, PICTURE_IDS})
"""Columns that a model reads on the host, to know how much there is to do; the others are where the model is."""


@dataclass(frozen=True)
class Picture:
    """An image, or a tile of one, resized for the model but not normalised.

    Attributes:
        pixels: RGB, `[height, width, 3]`; both sizes are multiples of what the model merges.
    """

    pixels: UInt8[np.ndarray, "height width 3"]

    @cached_property
    def flat(self) -> UInt8[np.ndarray, " bytes"]:
        """The flattened pixels, always the same object, so that sequences share it."""
        return self.pixels.reshape(-1)

    @cached_property
    def digest(self) -> int:
        """63 bits of a digest of size and pixels."""
        found = blake2b(repr(self.pixels.shape).encode(), digest_size=8)
        found.update(self.pixels.tobytes())
        return int.from_bytes(found.digest(), "big") >> 1


def image_inputs(pictures: Sequence[Picture], is_image: Bool[np.ndarray, " tokens"]) -> dict[str, ModelInput]:
    """Return the model's inputs of one sequence.

    Args:
        pictures: In the order of their tokens; empty for text.
        is_image: True for image tokens; what follows them is text.
    """
    sizes = np.array([picture.pixels.shape[:2] for picture in pictures], dtype=np.int64).reshape(-1, 2)
    digests = np.array([picture.digest for picture in pictures], dtype=np.int64)
    return {
        PIXELS: ModelInput(tuple(picture.flat for picture in pictures), Axis.SHARED),
        PICTURE_SIZES: ModelInput(sizes, Axis.RAGGED),
        PICTURE_IDS: ModelInput(digests, Axis.RAGGED),
        IS_IMAGE: ModelInput(np.asarray(is_image, dtype=np.bool_), Axis.TOKEN, fill=False),
    }


def pictures_in(inputs: Mapping[str, ModelInput]) -> list[Picture]:
    """Return the images of one sequence, at hand; none where it has no such inputs."""
    if PIXELS not in inputs:
        return []
    sizes = inputs[PICTURE_SIZES].values.tolist()
    return [Picture(flat.reshape(*size, 3)) for flat, size in zip(inputs[PIXELS].values, sizes, strict=True)]


def has_its_pixels(inputs: Mapping[str, ModelInput]) -> bool:
    """Return whether a sequence has as many arrays and digests as sizes, and each array the bytes of its size."""
    sizes = inputs[PICTURE_SIZES].values
    found = [num_bytes_of(array) for array in inputs[PIXELS].values]
    return len(inputs[PICTURE_IDS].values) == len(sizes) and found == (3 * sizes.prod(1)).tolist()


def picture_patches(batch: TokenBatch, num_patches: Callable[[int, int], int] | None) -> list[dict[int, int]]:
    """Return the patches of each sequence's images by digest; empty where there are no images.

    Args:
        num_patches: Patches of an image by height and width in pixels; None: a model of text.
    """
    if num_patches is None or PICTURE_IDS not in batch.columns:
        return []
    ids, sizes = batch.columns[PICTURE_IDS], batch.columns[PICTURE_SIZES]
    assert ids.sizes is not None
    patches = [num_patches(height, width) for height, width in sizes.values.tolist()]
    pairs = iter(zip(ids.values.tolist(), patches, strict=True))
    return [dict(islice(pairs, number)) for number in ids.sizes.tolist()]


def distinct_pictures(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Find repeated images.

    Args:
        ids: Digest of each image.

    Returns:
        Positions of the first occurrences, and for each image the index of its occurrence among these.
    """
    first: dict[int, int] = {}
    place = [first.setdefault(digest, len(first)) for digest in ids]
    positions = {number: position for position, number in reversed(list(enumerate(place)))}
    return [positions[number] for number in range(len(first))], place


def distinct_sizes(batch: TokenBatch) -> list[tuple[int, int]]:
    """Return height and width in pixels of a batch's distinct images; none where it has no such inputs."""
    if PICTURE_IDS not in batch.columns:
        return []
    chosen, _ = distinct_pictures(batch.columns[PICTURE_IDS].values.tolist())
    return [(int(height), int(width)) for height, width in batch.columns[PICTURE_SIZES].values[chosen].tolist()]


def distinct_pixels(pixels: SharedColumn, ids: Sequence[int]) -> UInt8[np.ndarray, " bytes"]:
    """Return the pixels of the distinct images, in the order of `distinct_pictures`.

    Args:
        ids: Digest of each image of all sequences.
    """
    arrays = [array for of_sequence in pixels.arrays for array in of_sequence]
    chosen, _ = distinct_pictures(ids)
    return np.concatenate([np.zeros(0, np.uint8), *(arrays[position] for position in chosen)])


def sequence_inputs(batch: TokenBatch, rows: Sequence[int]) -> list[dict[str, ModelInput]]:
    """Return the model's inputs of some rows of a batch, as they were before collation.

    Empty for a batch of text alone.
    """
    found: list[dict[str, ModelInput]] = []
    for row in rows if PIXELS in batch.shared else ():
        one = batch.select([row])
        inputs = {PIXELS: ModelInput(one.shared[PIXELS].arrays[0], Axis.SHARED)}
        for name in (PICTURE_SIZES, PICTURE_IDS, IS_IMAGE):
            column = one.columns[name]
            values = column.values.cpu().numpy()
            is_ragged = column.axis is Axis.RAGGED
            inputs[name] = ModelInput(values if is_ragged else values[0], column.axis, column.fill)
        found.append(inputs)
    return found

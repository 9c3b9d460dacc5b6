# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images beside token sequences: bytes of pictures as they travel, cut into patches only where the model runs.

A sequence of a vision-language model always carries all four inputs, with no pictures where it has none, so that
sequences with and without images make one batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from jaxtyping import Bool, UInt8

from nemo_rl_moe.distributed.batch import Axis, ModelInput, TokenBatch

PIXELS = "pixels"
"""Column: red, green and blue of all pictures' pixels, row by row, as bytes; ragged, `[bytes]`."""
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
    """One picture, or tile of one, as the model takes it: resized, not normalised.

    Attributes:
        pixels: Red, green and blue, `[height, width, 3]`; both sizes are multiples of what the model merges.
    """

    pixels: UInt8[np.ndarray, "height width 3"]

    @cached_property
    def digest(self) -> int:
        """63 bits of a digest of size and pixels."""
        found = blake2b(repr(self.pixels.shape).encode(), digest_size=8)
        found.update(self.pixels.tobytes())
        return int.from_bytes(found.digest(), "big") >> 1


def image_inputs(pictures: Sequence[Picture], is_image: Bool[np.ndarray, " tokens"]) -> dict[str, ModelInput]:
    """The model's inputs of one sequence.

    Args:
        pictures: In the order of their tokens; none for text.
        is_image: True for the tokens of pictures; what comes behind these tokens is text.
    """
    flat = [picture.pixels.reshape(-1) for picture in pictures]
    sizes = np.array([picture.pixels.shape[:2] for picture in pictures], dtype=np.int64).reshape(-1, 2)
    digests = np.array([picture.digest for picture in pictures], dtype=np.int64)
    return {
        PIXELS: ModelInput(np.concatenate(flat) if flat else np.zeros(0, np.uint8), Axis.RAGGED),
        PICTURE_SIZES: ModelInput(sizes, Axis.RAGGED),
        PICTURE_IDS: ModelInput(digests, Axis.RAGGED),
        IS_IMAGE: ModelInput(np.asarray(is_image, dtype=np.bool_), Axis.TOKEN, fill=False),
    }


def pictures_in(inputs: Mapping[str, ModelInput]) -> list[Picture]:
    """The pictures of one sequence; none where it has no such inputs."""
    if PIXELS not in inputs:
        return []
    sizes = inputs[PICTURE_SIZES].values
    ends = np.cumsum(sizes.prod(1) * 3)
    parts = np.split(inputs[PIXELS].values, ends[:-1]) if len(sizes) else []
    return [Picture(part.reshape(*size, 3)) for part, size in zip(parts, sizes.tolist(), strict=True)]


def sequence_inputs(batch: TokenBatch, rows: Sequence[int]) -> list[dict[str, ModelInput]]:
    """The model's inputs of some sequences of a batch, as they were before they were put together.

    Returns:
        Of each row; empty for a batch of text alone.
    """
    found: list[dict[str, ModelInput]] = []
    for row in rows if PIXELS in batch.columns else ():
        one = batch.select([row])
        inputs = {}
        for name in (PIXELS, PICTURE_SIZES, PICTURE_IDS, IS_IMAGE):
            column = one.columns[name]
            values = column.values.cpu().numpy()
            is_ragged = column.axis is Axis.RAGGED
            inputs[name] = ModelInput(values if is_ragged else values[0], column.axis, column.fill)
        found.append(inputs)
    return found

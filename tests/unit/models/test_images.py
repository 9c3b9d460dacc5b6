# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images as columns of a batch, and back."""

from dataclasses import replace

import numpy as np
import torch

from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.distributed.shared_arrays import SharedColumn
from nemo_rl_moe.models.images import (
    IMAGE_IDS,
    IMAGE_SIZES,
    IS_IMAGE,
    PIXELS,
    ModelImage,
    distinct_images,
    distinct_pixels,
    has_its_pixels,
    image_inputs,
    image_patches,
    images_in,
)


def image(height: int, width: int, seed: int) -> ModelImage:
    return ModelImage(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def text_batch(lengths: list[int]) -> TokenBatch:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    return TokenBatch(ids, torch.tensor(lengths), ids > 0, ("",) * len(lengths))


def test_images_come_back_as_they_were() -> None:
    images = [image(8, 4, 0), image(4, 12, 1)]
    found = images_in(image_inputs(images, np.array([False, True, True])))
    assert [each.pixels.tolist() for each in found] == [each.pixels.tolist() for each in images]
    assert images_in(image_inputs([], np.zeros(3, np.bool_))) == images_in({}) == []


def test_sequences_with_and_without_images_make_one_batch() -> None:
    with_two = image_inputs([image(8, 4, 0), image(4, 4, 1)], np.array([True, True, False]))
    without = image_inputs([], np.array([False]))
    batch = text_batch([1, 3]).with_inputs([without, with_two])
    columns, (none, two) = batch.columns, batch.shared[PIXELS].arrays
    assert none == ()
    assert [np.asarray(array).tolist() for array in two] == [each.tolist() for each in with_two[PIXELS].values]
    assert two[0].dtype == np.uint8
    assert columns[IMAGE_SIZES].values.tolist() == [[8, 4], [4, 4]]
    assert columns[IS_IMAGE].values.tolist() == [[False] * 3, [True, True, False]]
    second = columns[IMAGE_IDS].select(torch.tensor([1]), 3)
    assert second.values.tolist() == with_two[IMAGE_IDS].values.tolist()


def test_patches_of_each_sequence_by_image() -> None:
    a, b = image(8, 4, 0), image(4, 4, 1)
    inputs = [image_inputs(images, np.array([True])) for images in ([a, b], [], [b, b], [a])]
    batch = text_batch([1] * 4).with_inputs(inputs)
    found = image_patches(batch, lambda height, width: height * width // 16)
    assert found == [{a.digest: 2, b.digest: 1}, {}, {b.digest: 1}, {a.digest: 2}]
    assert image_patches(batch, None) == image_patches(text_batch([1]), lambda height, width: 1) == []


def test_each_distinct_image_is_there_once_where_it_is_there_first() -> None:
    assert distinct_images([7, 5, 7, 7, 3, 5]) == ([0, 1, 4], [0, 1, 0, 0, 2, 1])
    assert distinct_images([]) == ([], [])
    a, b, again = image(2, 1, 0), image(1, 1, 1), image(2, 1, 0)
    column = SharedColumn(((a.flat,), (), (b.flat, again.flat)))
    found = distinct_pixels(column, [each.digest for each in (a, b, again)])
    assert found.tolist() == [*a.flat.tolist(), *b.flat.tolist()]
    assert distinct_pixels(SharedColumn(((), ())), []).shape == (0,)


def test_pixels_are_reported_to_be_those_of_the_sizes() -> None:
    inputs = image_inputs([image(8, 4, 0), image(4, 4, 1)], np.array([True]))
    assert has_its_pixels(inputs)
    for name in (PIXELS, IMAGE_IDS, IMAGE_SIZES):
        assert not has_its_pixels({**inputs, name: replace(inputs[name], values=inputs[name].values[:1])})
        assert not has_its_pixels({**inputs, PIXELS: replace(inputs[PIXELS], values=inputs[PIXELS].values[::-1])})


def test_a_digest_distinguishes_images_and_shapes_too() -> None:
    zeros = np.zeros((4, 8, 3), np.uint8)
    assert ModelImage(zeros).digest == ModelImage(zeros.copy()).digest
    assert (
        ModelImage(zeros).digest != ModelImage(zeros.reshape(8, 4, 3)).digest != ModelImage(zeros + np.uint8(1)).digest
    )
    assert ModelImage(zeros[:, ::2]).digest == ModelImage(np.ascontiguousarray(zeros[:, ::2])).digest

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures as columns of a batch, and back."""

import numpy as np
import torch

from nemo_rl_moe.distributed.batch import collate_inputs
from nemo_rl_moe.models.images import IS_IMAGE, PICTURE_IDS, PICTURE_SIZES, PIXELS, Picture, image_inputs, pictures_in


def picture(height: int, width: int, seed: int) -> Picture:
    return Picture(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_pictures_come_back_as_they_were() -> None:
    pictures = [picture(8, 4, 0), picture(4, 12, 1)]
    found = pictures_in(image_inputs(pictures, np.array([False, True, True])))
    assert [each.pixels.tolist() for each in found] == [each.pixels.tolist() for each in pictures]
    assert pictures_in(image_inputs([], np.zeros(3, np.bool_))) == pictures_in({}) == []


def test_sequences_with_and_without_pictures_make_one_batch() -> None:
    with_two = image_inputs([picture(8, 4, 0), picture(4, 4, 1)], np.array([True, True, False]))
    without = image_inputs([], np.array([False]))
    columns = {name: collate_inputs([without[name], with_two[name]], 5) for name in with_two}
    num_bytes = columns[PIXELS].sizes
    assert num_bytes is not None
    assert num_bytes.tolist() == [0, 8 * 4 * 3 + 4 * 4 * 3]
    assert columns[PIXELS].values.dtype == torch.uint8
    assert columns[PICTURE_SIZES].values.tolist() == [[8, 4], [4, 4]]
    assert columns[IS_IMAGE].values.tolist() == [[False] * 5, [True, True, False, False, False]]
    second = columns[PICTURE_IDS].select(torch.tensor([1]), 5)
    assert second.values.tolist() == with_two[PICTURE_IDS].values.tolist()


def test_a_digest_tells_pictures_apart_and_shapes_too() -> None:
    zeros = np.zeros((4, 8, 3), np.uint8)
    assert Picture(zeros).digest == Picture(zeros.copy()).digest
    assert Picture(zeros).digest != Picture(zeros.reshape(8, 4, 3)).digest != Picture(zeros + np.uint8(1)).digest
    assert Picture(zeros[:, ::2]).digest == Picture(np.ascontiguousarray(zeros[:, ::2])).digest

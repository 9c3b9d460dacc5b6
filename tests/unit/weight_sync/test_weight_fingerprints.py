# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights: one for each set of values, whatever stores them, and none for another."""

import pytest
import torch

from nemo_rl_moe.weight_sync.fingerprints import (
    WeightComparison,
    common_format,
    compare_fingerprints,
    fingerprint,
    fingerprints_of,
)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_copy_has_it_in_every_format_and_layout() -> None:
    sent = values(6, 8).bfloat16()
    for copy in (sent.clone(), sent.float(), sent.double(), sent.t().contiguous().t(), torch.cat([sent, sent])[6:]):
        assert fingerprint(copy, "bfloat16") == fingerprint(sent, "bfloat16")


def test_an_engine_that_rounds_has_that_of_the_rounded_weights() -> None:
    trained = values(6, 8)
    for stored in (trained.bfloat16(), trained.half()):
        number_format = common_format("float32", str(stored.dtype).removeprefix("torch."))
        assert fingerprint(stored, number_format) == fingerprint(trained, number_format)
        assert fingerprint(stored, "float32") != fingerprint(trained, "float32")
    assert common_format("bfloat16", "float32") == "bfloat16", "what was sent is of 16 bits"
    assert common_format("bfloat16", "float16") == "float16"


def test_zeros_of_either_sign_are_zero() -> None:
    assert fingerprint(torch.tensor([0.0, -0.0]), "bfloat16") == fingerprint(torch.zeros(2), "bfloat16")


@pytest.mark.parametrize("place", [0, 23, 47])
def test_one_bit_changes_it(place: int) -> None:
    sent = values(6, 8).bfloat16()
    other = sent.clone()
    other.view(torch.int16).flatten()[place] ^= 1
    assert fingerprint(other, "bfloat16") != fingerprint(sent, "bfloat16")


def test_values_that_change_places_or_shape_change_it() -> None:
    sent = values(6, 6)
    others = (sent.t(), sent.flip(0), sent.roll(1, 1), sent.reshape(4, 9), sent.flatten())
    found = {fingerprint(each, "float32") for each in (sent, *others)}
    assert len(found) == 6


def test_what_differs_is_named_and_what_one_side_lacks_is_not() -> None:
    names = [f"layer {number}" for number in range(7)]
    expected = fingerprints_of([(name, values(3, seed=n)) for n, name in enumerate(names)], "float32")
    found = {**expected, "layer 5": "3 other", "layer 2": "3 other", "of the engine alone": "x", "layer 6": "1x3 other"}
    del found["layer 0"]
    comparison = compare_fingerprints(found, expected)
    assert comparison == WeightComparison(["layer 2", "layer 5"], num_compared=5, num_tensors=7)
    assert comparison.share_compared == pytest.approx(5 / 7)
    assert str(comparison) == "2 of 5 tensors differ: layer 2, layer 5"
    assert str(compare_fingerprints(dict.fromkeys(names, "3 other"), expected)) == (
        "7 of 7 tensors differ: layer 0, layer 1, layer 2, layer 3 and 3 more"
    )
    assert compare_fingerprints({}, {}).share_compared == 0

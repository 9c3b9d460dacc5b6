# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from nemo_rl_moe.runs.report.arrays import ArrayPool, narrowest
from tests.unit.runs.report.packed_arrays import unpacked

anything = st.sampled_from([np.uint8, np.uint16, np.uint32, np.int32, np.float32]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=3, min_side=0))
)


@given(several=st.lists(anything, max_size=5))
def test_arrays_come_back_bit_by_bit(several: list[np.ndarray]) -> None:
    pool = ArrayPool("some")
    references = [pool.add(array) for array in several]
    blobs = {"some": pool.encoded()}
    for array, reference in zip(several, references, strict=True):
        found = unpacked(reference, blobs)
        assert (found.shape, found.tobytes()) == (array.shape, array.tobytes())


def test_an_array_that_is_there_is_not_put_in_again() -> None:
    pool = ArrayPool("some")
    steps = np.arange(1000, dtype=np.int32)
    assert pool.add(steps)["offset"] == pool.add(steps.copy())["offset"] == 0
    assert pool.add(steps.astype(np.float32))["offset"] == 4000
    assert pool.add(steps[:0])["offset"] == 8000


@pytest.mark.parametrize(
    ("highest", "dtype"), [(0, "u1"), (255, "u1"), (256, "u2"), (65536, "u4"), (2**32 - 1, "u4"), (2**32, "f8")]
)
def test_counts_take_the_narrowest_type_that_is_exact(highest: int, dtype: str) -> None:
    counts = np.array([0, highest], dtype=np.int64)
    assert narrowest(counts).dtype.str[1:] == dtype
    assert narrowest(counts).tolist() == [0, highest]

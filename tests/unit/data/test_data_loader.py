# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches
from nemo_rl_moe.errors import DataError
from tests.unit.data.conftest import refused


def dataset(size):
    return [TokenizedExample(np.array([i, i], np.int32), np.array([False, True]), False, str(i)) for i in range(size)]


def order(loader, epoch):
    return [int(name) for batch in loader.epoch(epoch) for name in batch.sample_ids]


def test_order_depends_on_seed_and_epoch_alone():
    first, again = (GlobalBatchLoader(dataset(50), 10, 0, seed=7) for _ in range(2))
    assert order(first, 0) == order(again, 0) == order(first, 0)
    assert order(again, 3) == order(first, 3)  # no need to run through the epochs before
    assert order(first, 0) != order(first, 1)
    assert order(first, 0) != order(GlobalBatchLoader(dataset(50), 10, 0, seed=8), 0)


def test_order_is_the_same_on_every_machine():
    assert order(GlobalBatchLoader(dataset(8), 4, 0, seed=42), 0) == [3, 4, 2, 7, 6, 1, 5, 0]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 3))
def test_no_example_twice_and_only_the_incomplete_batch_left_out(size, batch_size, seed, epoch):
    if batch_size > size:
        with pytest.raises(DataError):
            GlobalBatchLoader(dataset(size), batch_size, 0, seed)
        return
    loader = GlobalBatchLoader(dataset(size), batch_size, 0, seed)
    batches = list(loader.epoch(epoch))
    assert len(batches) == len(loader) == size // batch_size
    assert all(len(batch) == batch_size for batch in batches)
    seen = order(loader, epoch)
    assert len(set(seen)) == len(seen) == size // batch_size * batch_size


def test_without_shuffling_the_order_is_the_data_s():
    loader = GlobalBatchLoader(dataset(7), 3, 0, seed=1, shuffle=False)
    assert order(loader, 0) == order(loader, 5) == [0, 1, 2, 3, 4, 5]


def test_too_few_examples():
    assert refused(GlobalBatchLoader, dataset(3), 4, 0, seed=0) == [
        "policy.train_global_batch_size: got 4, but the training data has only 3 examples that can be used"
    ]


def test_validation_keeps_the_incomplete_batch():
    batches = list(sequential_batches(dataset(7), 3, 0))
    assert [batch.sample_ids for batch in batches] == [("0", "1", "2"), ("3", "4", "5"), ("6",)]
    assert [len(batch) for batch in sequential_batches(dataset(7), 3, 0, max_batches=2)] == [3, 3]
    assert [len(batch) for batch in sequential_batches(dataset(7), 3, 0, max_batches=9)] == [3, 3, 1]
    assert [len(batch) for batch in sequential_batches(dataset(2), 3, 0)] == [2]

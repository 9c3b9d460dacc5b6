# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that sequences have in common: with their sequences through every rearrangement, and once in a store."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.distributed.batch import Axis, ModelInput, TokenBatch, append_fillers, make_shards
from nemo_rl_moe.distributed.shared_arrays import ArrayStore, SharedColumn, num_bytes_of
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.generation.interface import GenerationBatch, SamplingParameters


class Shelf:
    """A store whose handles are numbers; counts what is asked of it."""

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}
        self.asked: list[list[int]] = []

    def put(self, array: np.ndarray) -> "Handle":
        handle = Handle(len(self.arrays))
        self.arrays[handle.number] = array
        return handle

    def fetch(self, handles: Sequence["Handle"]) -> list[np.ndarray | None]:
        self.asked.append([handle.number for handle in handles])
        return [self.arrays.get(handle.number) for handle in handles]


class Handle:
    """One of a `Shelf`."""

    def __init__(self, number: int):
        self.number = number


def array(first: int, size: int = 4) -> np.ndarray:
    return np.arange(first, first + size, dtype=np.uint8)


def batch_of(arrays: Sequence[Sequence[np.ndarray]]) -> TokenBatch:
    """A batch of sequences with these arrays each."""
    ids = torch.arange(len(arrays))[:, None].expand(-1, 3).clone()
    batch = TokenBatch(ids, torch.full((len(arrays),), 3), torch.ones_like(ids, dtype=torch.bool), ("",) * len(arrays))
    return batch.with_inputs([{"pixels": ModelInput(tuple(own), Axis.SHARED)} for own in arrays])


def values_of(batch: TokenBatch) -> list[list[list[int]]]:
    """All values of each array of each sequence."""
    return [[np.asarray(each).tolist() for each in own] for own in batch.shared["pixels"].arrays]


def firsts(batch: TokenBatch) -> list[list[int]]:
    """First value of each array of each sequence."""
    return [[each[0] for each in own] for own in values_of(batch)]


def test_arrays_stay_with_their_sequences() -> None:
    a, b = array(10), array(20, 6)
    batch = batch_of([[a], [], [b, a], [b]])
    assert batch.columns == {}
    assert firsts(batch.select([2, 0, 1])) == [[20, 10], [10], []]
    assert firsts(append_fillers(batch, [3, 2])) == [[10], [], [20, 10], [20], [20], [20, 10]]
    shards = make_shards(batch, [[(3, 0), (1,)], [(2,), (0, 2)]], batch)
    assert [[firsts(part) for part in shard.microbatches] for shard in shards] == [
        [[[20], [10]], [[]]],
        [[[20, 10]], [[10], [20, 10]]],
    ]
    assert batch.for_model().shared == batch.shared
    assert batch.for_loss().shared == {}


def test_a_store_gets_each_array_once_and_gives_it_back() -> None:
    shelf = Shelf()
    store = ArrayStore(shelf.put)
    a, b = array(10), array(20, 6)
    batch = batch_of([[a], [b, a], [a]])
    placed = batch.with_shared_in(store)
    assert len(shelf.arrays) == 1
    assert shelf.arrays[0].tolist() == [*a.tolist(), *b.tolist()]
    again = batch.select([1, 2]).with_shared_in(store)
    assert len(shelf.arrays) == 1, "what lies there already is not put again"
    assert placed.with_shared_in(store).shared["pixels"] == placed.shared["pixels"]
    for found, expected in ((placed, batch), (again, batch.select([1, 2]))):
        assert values_of(found.fetched(shelf.fetch)) == values_of(expected)
    assert shelf.asked == [[0], [0]]
    assert placed.fetched(shelf.fetch, with_shared=False).shared == {}
    assert shelf.asked == [[0], [0]]


def test_large_arrays_lie_apart() -> None:
    shelf = Shelf()
    store = ArrayStore(shelf.put)
    large = [np.full(600_000, number, dtype=np.uint8) for number in range(3)]
    placed = batch_of([[each] for each in large]).with_shared_in(store)
    assert len(shelf.arrays) == 3
    assert firsts(placed.select([2]).fetched(shelf.fetch)) == [[2]]
    assert shelf.asked == [[2]]


def test_what_nobody_holds_any_more_leaves_the_store() -> None:
    shelf = Shelf()
    store = ArrayStore(shelf.put)
    kept = array(10)
    for number in range(20):
        assert firsts(batch_of([[array(30 + number), kept]]).with_shared_in(store).fetched(shelf.fetch)) == [
            [30 + number, 10]
        ]
    assert len(store._stored) == 1


def test_an_array_that_is_lost_is_reported() -> None:
    shelf = Shelf()
    placed = batch_of([[array(0)]]).with_shared_in(ArrayStore(shelf.put))
    shelf.arrays.clear()
    with pytest.raises(ValueError, match="is lost"):
        placed.fetched(shelf.fetch)


def test_a_pickled_part_holds_each_array_once() -> None:
    image = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
    batch = batch_of([[image]] * 16)
    (shard,) = make_shards(batch, [[range(8), range(8, 16)]], batch)
    assert len(pickle.dumps(shard)) < 70_000
    placed = pickle.dumps(make_shards(batch.with_shared_in(ArrayStore(lambda _: 0)), [[range(16)]], batch))
    assert len(placed) < 5_000


def test_the_size_of_an_array_is_known_wherever_it_lies() -> None:
    assert num_bytes_of(array(0, 7)) == num_bytes_of(StoredRows.of(array(0, 7))) == 7


def test_requests_have_their_arrays_in_a_store_too() -> None:
    shelf = Shelf()
    a, b = array(10), array(20)
    inputs: list[dict[str, Any]] = [
        {"pixels": ModelInput((a,), Axis.SHARED), "sizes": ModelInput(np.ones((1, 2)), Axis.RAGGED)},
        {},
        {"pixels": ModelInput((b, a), Axis.SHARED)},
    ]
    sampling = SamplingParameters(max_new_tokens=2, temperature=0.0, stop_token_ids=())
    request = GenerationBatch(((1,), (2,), (3,)), (0, 1, 2), sampling, tuple(inputs))
    placed = request.with_shared_in(ArrayStore(shelf.put))
    assert len(shelf.arrays) == 1
    assert all(isinstance(each, StoredRows) for each in placed.model_inputs[2]["pixels"].values)
    assert placed.model_inputs[0]["sizes"] is inputs[0]["sizes"]
    found = placed.share(0, 2).fetched(shelf.fetch)
    assert [[int(each[0]) for each in one["pixels"].values] for one in found.model_inputs] == [[10], [20, 10]]
    text = GenerationBatch(((1,),), (0,), sampling)
    assert text.with_shared_in(ArrayStore(shelf.put)) == text


def test_a_column_of_none_at_all() -> None:
    assert SharedColumn(((), ())).fetched(lambda sources: []).arrays == ((), ())

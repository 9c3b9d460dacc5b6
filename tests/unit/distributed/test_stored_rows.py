# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows that lie in a store come to the tokens that they belong to, and to no others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.distributed.batch import Destination, TokenBatch, append_fillers, make_shard, stored_per_token
from nemo_rl_moe.distributed.stored_rows import Piece, StoredRows, fetch_rows, narrowed, put_together


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int16)[:, None]


def read(rows: Sequence[StoredRows | None], longest: int, fetch: Any = list) -> list[list[int]]:
    return fetch_rows(rows, longest, -1, fetch, (1,), "int16")[..., 0].tolist()


def test_sequences_that_are_put_down_together() -> None:
    stored: list[np.ndarray] = []
    found = put_together([rows_of(1, 2, 3), rows_of(), rows_of(4)], lambda array: stored.append(array) or array)
    assert len(stored) == 1
    assert read(found, 3) == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
    assert [rows.num_bytes for rows in found] == [6, 0, 2]
    assert put_together([], lambda array: array) == []


def test_arrays_of_several_sequences_stay_small() -> None:
    stored: list[np.ndarray] = []
    given = [rows_of(*range(size)) for size in (3, 2, 9, 1, 1)]  # 2 bytes a row
    found = put_together(given, lambda array: stored.append(array) or array, most_bytes=10)
    assert [len(array) for array in stored] == [5, 9, 2]
    assert read(found, 9) == [[*range(size)] + [-1] * (9 - size) for size in (3, 2, 9, 1, 1)]


def test_numbers_that_fit_8_bits_are_stored_in_8_and_read_in_16() -> None:
    """Experts of a model with up to 128 of them, -1 where unknown."""
    stored: list[np.ndarray] = []
    put = lambda array: stored.append(array) or array  # noqa: E731
    few, many = [rows_of(-1, 0, 127), rows_of(3)], [rows_of(0, 128), rows_of(-129)]
    assert read(put_together(few, put), 3) == [[-1, 0, 127], [3, -1, -1]]
    assert read(put_together(many, put, most_bytes=4), 2) == [[0, 128], [-129, -1]]
    assert [array.dtype for array in stored] == [np.int8, np.int16, np.int16]
    assert narrowed(np.arange(3)).dtype == np.int64, "other columns stay as they are"


def test_of_tokens_that_two_requests_have_seen_the_first_one_counts() -> None:
    first, second, third = (StoredRows.of(rows_of(*numbers)) for numbers in ((1, 2), (10, 20, 30, 40), (5,)))
    joined = first.followed_by(second).followed_by(third)
    assert joined.end == 4
    assert read([joined], 5) == [[1, 2, 30, 40, -1]]


def test_each_array_is_fetched_once_and_a_lost_one_leaves_its_rows_unknown() -> None:
    asked: list[Any] = []

    def fetch(sources: Sequence[Any]) -> list[np.ndarray | None]:
        asked.extend(sources)
        return [None if source == "lost" else rows_of(7, 8) for source in sources]

    def at(source: str, first: int) -> StoredRows:
        return StoredRows((Piece(source, first, 0, 1),), (1,), "int16")

    there = "there"
    assert read([at(there, 0), at(there, 1), at("lost", 0), None], 2, fetch) == [[7, -1], [8, -1], [-1, -1], [-1, -1]]
    assert asked == ["there", "lost"]


@pytest.mark.parametrize("array", [rows_of(1), rows_of(1, 2).astype(np.int32), np.zeros((2, 2), np.int16)])
def test_an_array_that_is_not_what_was_said_of_it_is_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="stored rows: got"):
        read([StoredRows((Piece(array, 0, 0, 2),), (1,), "int16")], 2)


def test_a_stored_column_follows_its_sequences() -> None:
    lengths = torch.tensor([3, 1, 2])
    capture = stored_per_token(
        [StoredRows.of(rows_of(*range(10 * n, 10 * n + int(lengths[n])))) for n in range(3)], fill=-1
    )
    assert capture is not None
    names = ("a", "b", "c")
    batch = TokenBatch(torch.zeros(3, 3, dtype=torch.long), lengths, torch.ones(3, 3, dtype=torch.bool), names)
    batch = batch.with_stored("capture", capture)
    assert set(batch.for_model().stored) == {"capture"}
    assert batch.without_stored("capture").stored == {}
    fetched = make_shard(batch, [[2, 2, 0]], batch).microbatches[0].fetched(list)
    assert fetched.stored == {}
    column = fetched.columns["capture"]
    assert column.goes_to is Destination.MODEL
    assert column.fill == -1
    assert column.values[..., 0].tolist() == [[20, 21, -1], [20, 21, -1], [0, 1, 2]]
    with_filler = append_fillers(batch, [2]).select([2, 3, 0]).fetched(list)
    assert with_filler.columns["capture"].values[..., 0].tolist() == [[20, 21, -1], [-1, -1, -1], [0, 1, 2]]
    assert stored_per_token([None, None]) is None

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.batch import (
    TokenBatch,
    append_fillers,
    count_trained_sequences,
    make_shard,
    per_sequence,
    per_token,
)
from tests.support.quick_list import examples


def make_batch(lengths: list[int], columns: int | None = None) -> TokenBatch:
    """Token `100 * row + column` everywhere; all but the first token of a sequence count."""
    columns = columns or max(lengths)
    positions = torch.arange(columns)
    lengths_tensor = torch.tensor(lengths)
    real = positions < lengths_tensor[:, None]
    ids = 100 * torch.arange(len(lengths))[:, None] + positions
    return TokenBatch(
        input_ids=ids * real,
        lengths=lengths_tensor,
        token_mask=real & (positions > 0),
        sample_ids=tuple(f"sample {row}" for row in range(len(lengths))),
        columns={"advantages": per_token(ids.double()), "reward": per_sequence(torch.arange(len(lengths)).float())},
    )


def test_select_reorders_and_cuts_to_the_longest():
    chosen = make_batch([5, 2, 3]).select([2, 1])
    assert chosen.input_ids.tolist() == [[200, 201, 202], [100, 101, 0]]
    assert chosen.lengths.tolist() == [3, 2]
    assert chosen.token_mask.tolist() == [[False, True, True], [False, True, False]]
    assert chosen.sample_ids == ("sample 2", "sample 1")
    assert chosen.columns["advantages"].values.tolist() == [[200, 201, 202], [100, 101, 102]]
    assert chosen.columns["reward"].values.tolist() == [2, 1]
    assert len(chosen) == 2


def test_select_nothing():
    assert len(make_batch([5, 2]).select([])) == 0


def test_select_leaves_the_batch_alone():
    batch = make_batch([3, 3])
    batch.select([0]).input_ids.fill_(7)
    assert 7 not in batch.input_ids


def test_the_first_token_never_counts():
    batch = make_batch([4, 1])
    batch.token_mask[:, 0] = True
    assert batch.num_valid_tokens() == 3
    assert count_trained_sequences(batch) == 1


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_selecting_keeps_every_real_token(lengths: list[int], data: st.DataObject):
    batch = make_batch(lengths, columns=12)
    indices = data.draw(st.permutations(range(len(lengths))))
    chosen = batch.select(indices)
    assert chosen.num_valid_tokens() == batch.num_valid_tokens() == sum(lengths) - len(lengths)
    for row, index in enumerate(indices):
        assert torch.equal(chosen.input_ids[row, : lengths[index]], batch.input_ids[index, : lengths[index]])


def test_a_shard_carries_the_totals_of_the_global_batch():
    batch = make_batch([5, 2, 3, 4])
    shard = make_shard(batch, [(0, 2), (3,)], totals=batch)
    assert [microbatch.lengths.tolist() for microbatch in shard.microbatches] == [[5, 3], [4]]
    assert (shard.global_valid_tokens, shard.global_sequences) == (10, 4)


def test_fillers_run_but_do_not_count():
    batch = make_batch([5, 2, 3])
    filled = append_fillers(batch, (1, 1))
    assert len(filled) == 5
    assert filled.lengths.tolist() == [5, 2, 3, 2, 2]
    assert torch.equal(filled.token_mask[:3], batch.token_mask)
    assert not filled.token_mask[3:].any()
    assert filled.num_valid_tokens() == batch.num_valid_tokens()
    assert batch.token_mask[1].any(), "the sequence that was repeated still counts once"


def test_no_fillers_no_copy():
    batch = make_batch([5])
    assert append_fillers(batch, ()) is batch


@pytest.mark.parametrize("rows", [1, 3])
def test_an_extra_of_one_value_a_sequence_is_not_cut(rows: int):
    batch = make_batch([4] * rows)
    assert batch.select([0]).columns["reward"].values.shape == (1,)

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


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_selecting_keeps_every_real_token(lengths: list[int], data: st.DataObject):
    batch = make_batch(lengths, columns=12)
    indices = data.draw(st.permutations(range(len(lengths))))
    chosen = batch.select(indices)
    assert chosen.num_valid_tokens() == batch.num_valid_tokens() == sum(lengths) - len(lengths)
    for row, index in enumerate(indices):
        assert torch.equal(chosen.input_ids[row, : lengths[index]], batch.input_ids[index, : lengths[index]])


@pytest.mark.parametrize("rows", [1, 3])
def test_an_extra_of_one_value_a_sequence_is_not_cut(rows: int):
    batch = make_batch([4] * rows)
    assert batch.select([0]).columns["reward"].values.shape == (1,)


LENGTHS = (3, 5, 2, 4)


@pytest.fixture
def batch() -> TokenBatch:
    """Four sequences: two trained tokens, four, one that has no prediction and so none, and none."""
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[0, 1:3] = True
    mask[1, :5] = True
    mask[2, 0] = True
    return TokenBatch(
        input_ids=torch.arange(20).reshape(4, 5),
        lengths=torch.tensor(LENGTHS),
        token_mask=mask,
        sample_ids=("a", "b", "c", "d"),
        columns={"advantages": per_sequence(torch.tensor([0.0, 1.0, 2.0, 3.0]))},
    )


def test_only_sequences_with_a_predicted_target_count(batch: TokenBatch) -> None:
    assert count_trained_sequences(batch) == 2
    assert batch.num_valid_tokens() == 6


def test_shard_holds_its_microbatches_and_the_totals_of_all(batch: TokenBatch) -> None:
    shard = make_shard(batch, [(0, 2), (3,)], batch)
    assert [microbatch.sample_ids for microbatch in shard.microbatches] == [("a", "c"), ("d",)]
    assert shard.microbatches[0].input_ids.tolist() == [[0, 1, 2], [10, 11, 12]], "cut to its own longest sequence"
    assert shard.microbatches[1].input_ids.tolist() == [[15, 16, 17, 18]]
    assert shard.microbatches[0].columns["advantages"].values.tolist() == [0.0, 2.0]
    assert (shard.global_valid_tokens, shard.global_sequences) == (6, 2)


def test_totals_are_of_the_global_batch_alone(batch: TokenBatch) -> None:
    shard = make_shard(batch, [(0,)], batch.select((0, 2)))
    assert (shard.global_valid_tokens, shard.global_sequences) == (2, 1)


def test_shards_of_all_ranks_share_the_totals_and_the_sequences(batch: TokenBatch) -> None:
    shards = [make_shard(batch, microbatches, batch) for microbatches in ([(0, 1)], [(2, 3)])]
    assert len({(shard.global_valid_tokens, shard.global_sequences) for shard in shards}) == 1
    trained = sum(microbatch.num_valid_tokens() for shard in shards for microbatch in shard.microbatches)
    assert trained == shards[0].global_valid_tokens


def test_fillers_repeat_sequences_and_never_count(batch: TokenBatch) -> None:
    filled = append_fillers(batch, (1, 1))
    assert filled.sample_ids == ("a", "b", "c", "d", "b", "b")
    assert torch.equal(filled.input_ids[4], batch.input_ids[1])
    assert filled.num_valid_tokens() == batch.num_valid_tokens() == 6
    assert count_trained_sequences(filled) == 2
    assert filled.lengths.tolist() == [3, 5, 2, 4, 5, 5]
    assert torch.equal(filled.token_mask[:4], batch.token_mask)
    assert not filled.token_mask[4:].any()
    assert batch.token_mask[1].all(), "the batch itself is left as it is"
    assert append_fillers(batch, ()) is batch

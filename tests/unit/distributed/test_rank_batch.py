# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from nemo_rl_moe.distributed.batch import TokenBatch, append_fillers, count_trained_sequences, make_shard, per_sequence

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
    assert batch.token_mask[1].all(), "the batch itself is left as it is"
    assert append_fillers(batch, ()) is batch

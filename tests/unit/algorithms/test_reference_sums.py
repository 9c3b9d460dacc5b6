# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the reference gives each response, measured before training for just the steps that are to come."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.dpo import batches_to_measure, precompute_reference_sums
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.dataset import DataReport
from nemo_rl_moe.data.loader import GlobalBatchLoader, TokenStore
from nemo_rl_moe.data.preferences import REFERENCE_SUMS, WORDS, PreferenceDataset, collate_pairs
from nemo_rl_moe.distributed.batch import TokenBatch


def pairs(count: int) -> PreferenceDataset:
    """Pair `i`: one token of prompt, then `i + 1` tokens of the chosen and one of the rejected response."""
    examples = [
        TokenizedExample(
            np.full(1 + length, index, np.int32), np.array([False] + [True] * length), False, f"{index} {name}"
        )
        for index in range(count)
        for name, length in (("chosen", index + 1), ("rejected", 1))
    ]
    return PreferenceDataset(TokenStore(examples), DataReport("pairs", WORDS, count))


def logprobs(batch: TokenBatch) -> Tensor:
    """Minus its token id for each token; what stands on prompts and padding must not count."""
    return -batch.input_ids.float().where(batch.token_mask, 1e9)


def loader_of(count: int, size: int) -> GlobalBatchLoader:
    return GlobalBatchLoader(pairs(count), size, 0, seed=5, make_batch=collate_pairs)


def test_sums_of_responses_go_to_their_pairs() -> None:
    measured = precompute_reference_sums(logprobs, pairs(4), [[3, 1], [2]], pad_token_id=9)
    sums = [pair.reference_sums for pair in measured]
    assert sums[1:] == [(-1.0 * 2, -1.0), (-2.0 * 3, -2.0), (-3.0 * 4, -3.0)]
    assert sums[0] is not None
    assert np.isnan(sums[0]).all()
    batch = collate_pairs([measured[3], measured[2]], 9)
    assert batch.columns[REFERENCE_SUMS].values.tolist() == [-12, -3, -6, -2]


@pytest.mark.parametrize("done", [0, 2, 5, 7])
def test_a_resumed_run_measures_what_it_needs_in_the_same_batches(done: int) -> None:
    loader = loader_of(11, 2)  # epochs of 5 batches, which leave out one pair
    whole = batches_to_measure(loader, range(8))
    assert sorted(index for batch in whole for index in batch) == sorted(
        {i for b in loader.indices(range(8)) for i in b}
    )
    resumed = batches_to_measure(loader, range(done, 8))
    assert all(batch in whole for batch in resumed)
    needed = {index for batch in loader.indices(range(done, 8)) for index in batch}
    assert needed <= {index for batch in resumed for index in batch}
    if done == 7:
        assert len(resumed) < len(whole)


def test_batches_of_one_epoch_are_the_training_batches() -> None:
    loader = loader_of(12, 3)
    assert batches_to_measure(loader, range(1, 4)) == list(loader.indices(range(1, 4)))
    measured = [collate_pairs([pairs(12)[i] for i in batch], 0) for batch in batches_to_measure(loader, range(4))]
    for trained, batch in zip(loader.epoch(0), measured, strict=True):
        assert torch.equal(trained.input_ids, batch.input_ids)
        assert replace(trained, sample_ids=()).lengths.tolist() == batch.lengths.tolist()
    assert batches_to_measure(loader, range(4, 4)) == []

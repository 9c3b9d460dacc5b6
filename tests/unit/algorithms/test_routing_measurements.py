# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which sequences are measured."""

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.routing_measurements import sampled_sequences
from nemo_rl_moe.distributed.batch import TokenBatch


def batch_of(trained: list[int]) -> TokenBatch:
    """Sequences of a prompt of one token and so many trained ones."""
    longest = 1 + max(trained)
    mask = (torch.arange(longest) > 0) & (torch.arange(longest) <= torch.tensor(trained)[:, None])
    lengths = 1 + torch.tensor(trained)
    return TokenBatch(torch.zeros(len(trained), longest, dtype=torch.long), lengths, mask, ("",) * len(trained))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.35, 1.0])
@pytest.mark.parametrize("step", range(5))
def test_chosen_sequences_hold_the_share_and_no_more_than_they_must(share: float, step: int) -> None:
    trained = np.random.default_rng(step).integers(1, 30, 40)
    chosen = sampled_sequences(batch_of(trained.tolist()), share, (7, step))
    assert chosen == sorted(set(chosen))
    held = trained[chosen].sum()
    assert held >= share * trained.sum()
    assert held - trained[chosen].max() < share * trained.sum()
    if share == 1:
        assert chosen == list(range(40))


def test_sequences_that_nothing_trains_on_are_left_out() -> None:
    assert sampled_sequences(batch_of([0, 3, 0, 2]), 1.0, (0, 1)) == [1, 3]
    assert sampled_sequences(batch_of([0, 0]), 0.5, (0, 1)) == []


def test_each_step_measures_others() -> None:
    batch = batch_of([5] * 100)
    chosen = [sampled_sequences(batch, 0.1, (3, step)) for step in (10, 20, 10)]
    assert chosen[0] == chosen[2] != chosen[1]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches by hand."""

import numpy as np

from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.data.loader import collate


def example(ids, trained_from, name):
    mask = np.arange(len(ids)) >= trained_from
    return TokenizedExample(np.array(ids, dtype=np.int32), mask, False, name)


def test_pads_on_the_right_to_the_longest():
    batch = collate([example([5, 6], 1, "a"), example([7, 8, 9, 4], 2, "b")], pad_token_id=3)
    assert batch.input_ids.tolist() == [[5, 6, 3, 3], [7, 8, 9, 4]]
    assert batch.lengths.tolist() == [2, 4]
    assert batch.token_mask.tolist() == [[False, True, False, False], [False, False, True, True]]
    assert batch.sample_ids == ("a", "b")
    assert batch.num_valid_tokens() == 3
    assert batch.columns == {}


def test_does_not_share_memory_with_the_dataset():
    source = example([5, 6], 1, "a")
    batch = collate([source], 0)
    batch.input_ids[0, 0] = 9
    assert source.input_ids[0] == 5

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts examples side by side."""

from collections.abc import Sequence

import torch

from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.distributed.token_batch import TokenBatch


def collate(examples: Sequence[TokenizedExample], pad_token_id: int) -> TokenBatch:
    """Pads examples on the right to the longest of them.

    Args:
        examples: At least one.
        pad_token_id: What stands after an example's end.
    """
    lengths = torch.tensor([len(example) for example in examples], dtype=torch.long)
    shape = (len(examples), int(lengths.max()))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    token_mask = torch.zeros(shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = torch.as_tensor(example.input_ids, dtype=torch.long)
        token_mask[row, : len(example)] = torch.as_tensor(example.token_mask)
    return TokenBatch(input_ids, lengths, token_mask, tuple(example.sample_id for example in examples))

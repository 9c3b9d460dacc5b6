# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenization of one conversation."""

from nemo_rl_moe.data.chat import TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.records import BadLine, Example
from nemo_rl_moe.errors import DataError


def tokenize_example(example: Example, tokenizer, max_length: int) -> TokenizedExample:
    (result,) = batch_tokenizer(tokenizer, max_length)([example])
    if isinstance(result, BadLine):
        raise DataError(str(result))
    return result

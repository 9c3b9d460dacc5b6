# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Encoding of many texts in one call, in which a bad text does not cost the others."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Encoding = TypeVar("Encoding")


def encode_each(encode: Callable[[Sequence[Item]], Sequence[Encoding]], items: Sequence[Item]) -> list[Encoding | str]:
    """Encode items in one call; where that fails, one by one.

    Returns:
        The encodings, or what is wrong with an item.
    """
    if not items:
        return []
    try:
        return list(encode(items))
    except Exception as error:  # the tokenizers library raises bare `Exception`s
        if len(items) == 1:
            return [f"the tokenizer cannot encode the text: {error}"]
        return [result for item in items for result in encode_each(encode, [item])]

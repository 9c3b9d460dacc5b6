# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Encoding of many texts in few calls. A text that cannot be encoded does not affect the others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Encoding = TypeVar("Encoding")

CHARACTERS_PER_TOKEN = 64
"""Upper bound of the number of characters per token. Apart from blank space, published tokenizers have 3 to 5 on
average."""
CHARACTERS_AT_ONCE = 1_000_000
"""Maximum number of characters in one call. The tokenizers library uses up to 300 bytes per token until the call
ends."""


def most_characters(max_tokens: int) -> int:
    """Return the number of characters of a text that are tokenized if `max_tokens` tokens are needed. The rest is cut,
    because tokenization uses 200 bytes per character."""
    return CHARACTERS_PER_TOKEN * (max_tokens + 1)


def num_characters(value: object) -> int:
    """Return the number of characters of all texts in a JSON value, including keys, at any depth."""
    found, left = 0, [value]
    while left:
        match left.pop():
            case str() as text:
                found += len(text)
            case Mapping() as entries:
                left.extend(entries)
                left.extend(entries.values())
            case list() | tuple() as entries:
                left.extend(entries)
    return found


def encode_each(
    encode: Callable[[Sequence[Item]], Sequence[Encoding]],
    items: Sequence[Item],
    num_characters: Callable[[Item], int],
) -> list[Encoding | str]:
    """Encode items, many in each call. Return for each item its encoding, or the reason why it cannot be encoded.

    If a call fails, its items are encoded one by one.

    Args:
        num_characters: Returns the number of characters of an item. `CHARACTERS_AT_ONCE` limits a call.
    """
    return [result for batch in _batches(items, num_characters) for result in _encode_batch(encode, batch)]


def _batches(items: Sequence[Item], num_characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    total = 0
    for item in items:
        number = num_characters(item)
        if batch and total + number > CHARACTERS_AT_ONCE:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += number
    if batch:
        yield batch


def _encode_batch(
    encode: Callable[[Sequence[Item]], Sequence[Encoding]], items: Sequence[Item]
) -> list[Encoding | str]:
    try:
        return list(encode(items))
    except Exception as error:  # the tokenizers library raises bare `Exception`s
        if len(items) == 1:
            return [f"the tokenizer cannot encode the text: {error}"]
        return [result for item in items for result in _encode_batch(encode, [item])]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Encoding of texts to a maximum number of tokens: texts that are far too long are cut before they are encoded."""

from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")
Encoding = TypeVar("Encoding", bound=Sized)


def encode_each(encode: Callable[[Sequence[Item]], Sequence[Encoding]], items: Sequence[Item]) -> list[Encoding | str]:
    """Encode items in one call; where that fails, one by one, so that one bad text does not cost the others.

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
        # One text spoils the whole list: find it.
        return [result for item in items for result in encode_each(encode, [item])]


class LengthLimit:
    """Limit in characters that no text within a token limit exceeds: `max_length` times the longest token.

    Encoding takes time and memory by the length of the text, however little of it is kept.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int):
        longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._max_length = max_length
        # One token more than is kept, so that the rest of a text that has been cut still counts as too long.
        self._characters = (max_length + 1) * max(longest_token, 1)

    def encode(
        self,
        encode: Callable[[Sequence[Item]], Sequence[Encoding]],
        items: Sequence[Item],
        cut: Callable[[Item, int], Item],
    ) -> list[Encoding | str]:
        """Return the encodings that agree with those of the whole items as far as tokens are kept; see `encode_each`.

        Args:
            cut: Returns the beginning of an item, of a number of characters, or the item itself where it is no longer.
        """
        heads = [cut(item, self._characters) for item in items]
        results = encode_each(encode, heads)
        # A tokenizer that takes characters out, or joins unknown ones, can fit more of them into its tokens.
        again = [
            index
            for index, result in enumerate(results)
            if heads[index] is not items[index] and not isinstance(result, str) and len(result) <= self._max_length
        ]
        for index, result in zip(again, encode_each(encode, [items[index] for index in again]), strict=True):
            results[index] = result
        return results


def truncate_text(text: str, characters: int) -> str:
    """Return the beginning of a text, or the text itself if it is no longer."""
    return text if len(text) <= characters else text[:characters]

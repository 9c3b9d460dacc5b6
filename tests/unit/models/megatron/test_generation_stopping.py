# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where responses end: stop tokens, and strings however they are cut into tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.models.megatron.generation.sampling import StopCondition


class ByteTokenizer:
    """Tokens are bytes, some of them several."""

    pieces = (*(bytes([value]) for value in range(256)), b"ab", b"ba", b"abc", b" a")

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, token_ids: Sequence[int], **_options: Any) -> str:
        self.longest = max(self.longest, len(token_ids))
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


def first_end(tokens: Sequence[int], parameters: SamplingParameters, tokenizer: Any = None) -> int | None:
    """Return the number of tokens when the response ends, asked after every token as the engine does."""
    condition = StopCondition(parameters, tokenizer)
    responses = np.zeros((1, len(tokens)), dtype=np.int64)
    for length, token in enumerate(tokens, start=1):
        responses[0, length - 1] = token
        if condition.ended(responses, np.array([length]))[0]:
            return length
    return None


def with_strings(*strings: str) -> SamplingParameters:
    return SamplingParameters(100, stop_strings=strings)


def test_stop_token_belongs_to_the_response() -> None:
    assert first_end([4, 9, 7, 9], SamplingParameters(100, stop_token_ids=(7, 8))) == 3
    assert first_end([4, 9, 9], SamplingParameters(100, stop_token_ids=(7, 8))) is None
    assert first_end([4, 9], SamplingParameters(100)) is None


def test_rows_end_by_themselves() -> None:
    condition = StopCondition(SamplingParameters(100, stop_token_ids=(7,)), None)
    responses = np.array([[7, 1, 1], [1, 7, 1], [1, 1, 7]])
    assert condition.ended(responses, np.array([2, 2, 2])).tolist() == [False, True, False]
    assert condition.ended(responses, np.array([1, 0, 3])).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("text", "string", "length"),
    [
        (list(b"xyz END w"), "END", 7),
        (list(b"xENENDw"), "END", 6),
        ([*b"x", 258, *b"z"], "c", 2),
        ([*b"x", 256, 257, *b"z"], "bb", 3),
        ([*b"x", 256, 257, *b"z"], "bba", 3),
        ([*b"x", 256, 257, *b"z"], "xabb", 3),
        ([*b"x", 256, 257, *b"z"], "bz", None),
        ([*b"x", 256, 257, *b"z"], "az", 4),
        (list("naïve é end".encode()), "é", 9),
        (list("日本語".encode()), "本", 6),
    ],
)
def test_stop_strings(text: list[int], string: str, length: int | None) -> None:
    assert first_end(text, with_strings(string), ByteTokenizer()) == length


@given(st.lists(st.integers(32, 259), min_size=1, max_size=40), st.text("ab c", min_size=1, max_size=6))
def test_ends_with_the_token_that_completes_a_string(tokens: list[int], string: str) -> None:
    tokenizer = ByteTokenizer()
    expected = next(
        (count for count in range(1, len(tokens) + 1) if string in ByteTokenizer().decode(tokens[:count])), None
    )
    assert first_end(tokens, with_strings(string, "never"), tokenizer) == expected


def test_only_the_end_of_a_long_response_is_decoded() -> None:
    tokenizer = ByteTokenizer()
    assert first_end(list(b"x" * 2000 + b"END"), with_strings("END"), tokenizer) == 2003
    assert tokenizer.longest < 20


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        StopCondition(with_strings("END"), None)
    with pytest.raises(ValueError, match="empty string"):
        StopCondition(with_strings("END", ""), ByteTokenizer())

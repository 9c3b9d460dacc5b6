# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts are encoded a limited number of characters at a time, and a bad one alone is reported."""

from collections.abc import Sequence

import pytest

from nemo_rl_moe.data import encoding
from nemo_rl_moe.data.encoding import encode_each, most_characters, num_characters


class Calls:
    """Encodes a text as its length, and keeps the texts of each call."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[int]:
        self.texts.append(list(texts))
        if "bad" in texts:
            raise Exception("no such character")
        return [len(text) for text in texts]


def test_long_texts_do_not_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand records of a book each would otherwise take 300 bytes for each of their tokens at once."""
    monkeypatch.setattr(encoding, "CHARACTERS_AT_ONCE", 10)
    calls = Calls()
    assert encode_each(calls, ["a" * 30, "bb", "c" * 8, "d", ""], len) == [30, 2, 8, 1, 0]
    assert calls.texts == [["a" * 30], ["bb", "c" * 8], ["d", ""]]


def test_a_bad_text_does_not_cost_those_of_its_call() -> None:
    assert encode_each(Calls(), ["a", "bad", "cc"], len) == [
        1,
        "the tokenizer cannot encode the text: no such character",
        2,
    ]


def test_nothing_is_no_call() -> None:
    calls = Calls()
    assert encode_each(calls, [], len) == []
    assert calls.texts == []


def test_the_characters_of_a_value_are_those_of_all_its_texts() -> None:
    deep: list[object] = ["ab"]
    for _ in range(100_000):
        deep = [deep]
    assert num_characters([{"role": "user", "content": "four"}, ("x", 5, None), deep]) == 4 + 4 + 7 + 4 + 1 + 2
    assert most_characters(80) == 64 * 81

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers that are compared as texts."""

import pytest

from nemo_rl_moe.rewards.exact import ExactReward
from nemo_rl_moe.rewards.interface import Score, ScoringItem


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        ("left", "left", True),
        (" left\n", "left", True),
        ("light  blue", "light blue", True),
        ("4", "4", True),
        ("Left", "left", False),
        ("left left", "left", False),
        ("lightblue", "light blue", False),
        ("4.0", "4", True),
        ("4.1", "4", False),
        ("", "left", False),
    ],
)
def test_texts_are_compared(response: str, answer: str, is_right: bool) -> None:
    item = ScoringItem("f:1", "?", response, False, {"answer": answer})
    assert ExactReward().score(item) == Score(float(is_right), is_right)


def test_no_answer_equals_no_word() -> None:
    with pytest.raises(ValueError, match="f:1: the record's answer is null"):
        ExactReward().score(ScoringItem("f:1", "?", "None", False, {"answer": None}))

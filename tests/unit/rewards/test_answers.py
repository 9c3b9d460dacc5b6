# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which part of a response an environment sees."""

import pytest

from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rewards.registry import AnswerReward, answer_in


class Listener:
    """Remembers what it was asked."""

    def __init__(self):
        self.heard = []

    def score(self, item):
        self.heard.append((item.response, item.sample_id, item.record))
        return Score(1.0, True)


@pytest.mark.parametrize(
    ("response", "mark", "answer"),
    [
        ("<think>1</think>2", "</think>", "2"),
        ("1</think>2</think>3", "</think>", "3"),
        ("no mark", "</think>", "no mark"),
        ("2</think>", "</think>", ""),
        ("", "</think>", ""),
        ("<think>1</think>2", None, "<think>1</think>2"),
    ],
)
def test_answer_is_what_follows_the_last_mark(response, mark, answer):
    assert answer_in(response, mark) == answer


def test_environment_hears_the_answer_and_the_rest_as_it_was(item_of):
    listener = Listener()
    assert AnswerReward(listener, "=", True).score(item_of("1+1=2", answer="2")) == Score(1.0, True)
    assert listener.heard == [("2", "data.jsonl:1", {"answer": "2"})]


def test_truncated_responses(item_of):
    listener = Listener()
    assert AnswerReward(listener, None, False).score(item_of("2", is_truncated=True)) == Score(0.0, False)
    assert listener.heard == []
    assert AnswerReward(listener, None, True).score(item_of("2", is_truncated=True)) == Score(1.0, True)
    named = AnswerReward(listener, None, False, ("accuracy", "format")).score(item_of("2", is_truncated=True))
    assert named == Score.named({"accuracy": 0.0, "format": 0.0}, is_correct=False), "0 of each, and no fault"

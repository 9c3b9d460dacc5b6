# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers that are right letter by letter: words, names, choices."""

from nemo_rl_moe.rewards.interface import Score, ScoringItem


class ExactReward:
    """Compare a response with the record's answer as texts, apart from blank space; reward 1 or 0."""

    def score(self, item: ScoringItem) -> Score:
        """Score a response.

        Raises:
            ValueError: The record has no answer.
        """
        if (answer := item.record["answer"]) is None:
            raise ValueError("the record's answer is null: there is nothing to compare a response with")
        is_correct = item.response.split() == str(answer).split()
        return Score(float(is_correct), is_correct)

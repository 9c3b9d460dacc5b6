# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers that are right letter by letter: words, names, choices."""

from nemo_rl_moe.environments.interface import Score, ScoringItem


class ExactEnvironment:
    """Compares a response with the record's answer as texts; blank space at both ends, and how much stands between
    words, do not count.

    The reward is 1 for the same text and 0 otherwise.
    """

    def score(self, item: ScoringItem) -> Score:
        """Scores a response."""
        is_correct = item.response.split() == str(item.record["answer"]).split()
        return Score(float(is_correct), is_correct)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which part of a response counts, the same for all environments."""

from dataclasses import replace

from nemo_rl_moe.environments.interface import Environment, Score, ScoringItem


class AnswerEnvironment:
    """Shows an environment only the answer, and does not ask it about responses that have none.

    Args:
        environment: What scores.
        answer_after: The answer is what follows the last such text, or the whole response without it; None: always the
            whole response.
        score_truncated: Ask about responses that were cut at the length limit; otherwise they are wrong, with reward 0.
    """

    def __init__(self, environment: Environment, answer_after: str | None, score_truncated: bool):
        self._environment = environment
        self._answer_after = answer_after
        self._score_truncated = score_truncated

    def score(self, item: ScoringItem) -> Score:
        """Scores the answer in a response."""
        if item.is_truncated and not self._score_truncated:
            return Score(0.0, is_correct=False)
        return self._environment.score(replace(item, response=answer_in(item.response, self._answer_after)))


def answer_in(response: str, answer_after: str | None) -> str:
    """What follows the last `answer_after`; the whole response where it is missing or None."""
    return response if answer_after is None else response.rpartition(answer_after)[2]

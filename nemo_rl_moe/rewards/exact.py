# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers that are right letter by letter: words, names, choices, numbers."""

import re
from decimal import Decimal

from nemo_rl_moe.rewards.final_answers import choice_in, gold_answer
from nemo_rl_moe.rewards.interface import Score, ScoringItem

# A longer exponent is a value that no data has.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d{1,3})?")


class ExactReward:
    r"""Compare a response with the record's answer; reward 1 or 0.

    Texts are compared apart from blank space, numbers by their value, and the letter of a choice apart from its
    parentheses or full stop. Of an answer with its working, the part after `####` or in the last `\boxed{...}` counts.
    """

    def score(self, item: ScoringItem) -> Score:
        """Score a response.

        Raises:
            ValueError: The record's answer is null.
        """
        gold = gold_answer(item)
        is_correct = _value_of(item.response) == _value_of(gold)
        return Score(float(is_correct), is_correct)


def _value_of(text: str) -> Decimal | list[str]:
    """Return the number that a text is, or else its words."""
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return Decimal(stripped.replace(",", ""))
    return [choice_in(stripped) or stripped] if len(words := text.split()) == 1 else words

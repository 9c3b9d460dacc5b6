# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Exact comparison of answers: words, names, choices, numbers."""

import re
from decimal import Decimal

from nemo_rl_moe.rewards.final_answers import choice_in, gold_answer
from nemo_rl_moe.rewards.interface import Score, ScoringItem

# Exponents have at most three digits. No data has longer ones.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d{1,3})?")


class ExactReward:
    r"""Reward 1 for a response that equals the record's answer, else 0.

    Texts are compared without blank space, numbers by value, and the letter of a choice without its parentheses or full
    stop. If the answer contains its derivation, the part after `####` or in the last `\boxed{...}` counts.
    """

    def score(self, item: ScoringItem) -> Score:
        """Score a response. Raises ValueError if the record's answer is null."""
        gold = gold_answer(item)
        is_correct = _value_of(item.response) == _value_of(gold)
        return Score(float(is_correct), is_correct)


def _value_of(text: str) -> Decimal | list[str]:
    """Return the value of a number, or the words of another text."""
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return Decimal(stripped.replace(",", ""))
    return [choice_in(stripped) or stripped] if len(words := text.split()) == 1 else words

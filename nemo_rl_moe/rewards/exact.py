# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Exact comparison of answers, such as words, names, choices and numbers."""

import re
from decimal import Decimal

from nemo_rl_moe.rewards.final_answers import choice_in, gold_answer
from nemo_rl_moe.rewards.interface import Score, ScoringItem

# Exponents have at most three digits, since longer ones do not occur in data.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d{1,3})?")


class ExactReward:
    r"""Reward 1 if a response equals the record's answer, else 0.

    Texts are compared word by word, numbers by value, and the letter of a choice without parentheses or full stop. If
    the record's answer contains a derivation, only the part after `####` or in the last `\boxed{...}` is compared.
    """

    def score(self, item: ScoringItem) -> Score:
        """Return the score of a response. Raises ValueError if the record's answer is null."""
        gold = gold_answer(item)
        value = _value_of(item.response)
        is_correct = value == _value_of(gold)
        answer = " ".join(value) if isinstance(value, list) else _plain_number(value)
        return Score(float(is_correct), is_correct, answer=answer)


def _value_of(text: str) -> Decimal | list[str]:
    """Return the value if a text is a number, else its words."""
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return Decimal(stripped.replace(",", ""))
    return [choice_in(stripped) or stripped] if len(words := text.split()) == 1 else words


def _plain_number(value: Decimal) -> str:
    """Return a number without exponent, final zeros and the sign of zero."""
    text = f"{value:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if value == 0 else text

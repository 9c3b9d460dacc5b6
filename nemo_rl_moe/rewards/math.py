# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of mathematical answers by the math-verify library."""

import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.final_answers import (
    SEVERAL,
    are_words,
    choice_in,
    from_last_boxes,
    gold_answer,
    stated_choice,
    states_the_words,
    with_numbers_written_out,
    with_words_marked,
)
from nemo_rl_moe.rewards.interface import Score, ScoringItem

# Marks by which the library finds mathematics. Answers of data sets, such as \frac{1}{2}, often lack them. In such an
# answer, an escaped dollar means money, and \\[2pt] ends a line of a matrix.
_LATEX_MARK = re.compile(r"(?:^|[^\\])(?:\\\\)*(?:\$|\\\(|\\\[)|\\boxed")
ANSWERS_KEPT = 1024
_SMALLEST = 1e-12


class MathReward:
    r"""Compares the last answer in a response, such as `\boxed{\frac{1}{2}}`, `$0.5$` or `1/2`, with the record's
    answer.

    The reward is 1 for the same value and 0 otherwise. A response without mathematics is wrong. If a response has
    several boxes, the last one counts, together with boxes that only a comma, "and" or "or" separates from it. If the
    record's answer is the letter of a choice, "The answer is B." is accepted too. Words are compared as texts, ignoring
    case.
    """

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigurationError(
                f"env.reward.kind: math cannot be imported ({error}); pip install math-verify"
            ) from error
        # The library's time limits are off, because they use the alarm that this package needs. It would warn about
        # this.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library = math_verify
        self._parse_answer = lru_cache(maxsize=ANSWERS_KEPT)(self._parse_answer_anew)

    def score(self, item: ScoringItem) -> Score:
        """Return the score of a response. Raises ValueError if the record's answer is null or cannot be read as
        mathematics."""
        gold = gold_answer(item)
        if (choice := choice_in(gold)) is not None and (stated := stated_choice(item.response)) is not None:
            return Score(float(choice == stated), choice == stated, answer="" if stated == SEVERAL else stated)
        if states_the_words(item.response, gold):
            return Score(1.0, is_correct=True, answer=gold)
        answer, response = self._parse_answer(gold), from_last_boxes(item.response)
        response = with_words_marked(response) if are_words(gold) else with_numbers_written_out(response)
        found = self._library.parse(response, parsing_timeout=None)
        is_correct = bool(self._library.verify(answer, found, timeout_seconds=None))
        return Score(float(is_correct), is_correct, answer=gold if is_correct else _text_of(found))

    def _parse_answer_anew(self, answer: str) -> list[Any]:
        if are_words(answer):
            marked = with_words_marked(rf"\boxed{{{answer}}}")
        else:
            shown = with_numbers_written_out(answer)
            marked = shown if _LATEX_MARK.search(shown) else rf"\boxed{{{shown}}}"
        parsed: list[Any] = self._library.parse(marked, parsing_timeout=None)
        if not parsed:
            raise ValueError(f"the record's answer cannot be read as mathematics: {answer!r}")
        return parsed


def _text_of(found: Sequence[Any]) -> str:
    """Return a parsed wrong answer as text. Decimal numbers become fractions; other forms of a value stay different."""
    if not found:
        return ""
    value = found[0]
    # Fractions of larger or smaller numbers could have millions of digits.
    if getattr(value, "is_Float", False) and (value == 0 or _SMALLEST <= abs(value) <= 1 / _SMALLEST):
        return str(Fraction(str(value)))
    return str(value)

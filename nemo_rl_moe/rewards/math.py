# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers, compared for equality by the math-verify library."""

import logging
from functools import lru_cache
from typing import Any

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score, ScoringItem

# What shows the library where mathematics begins. Data sets hold bare answers, such as \frac{1}{2}, without it.
LATEX_MARKS = ("$", r"\boxed", r"\(", r"\[", r"\begin")
ANSWERS_KEPT = 1024


class MathReward:
    r"""Comparison of the last answer in a response, such as `\boxed{\frac{1}{2}}`, `$0.5$` or `1/2`, with the record's.

    The reward is 1 for the same value and 0 otherwise; a response without mathematics is wrong.

    Raises:
        ConfigurationError: The library is missing.
    """

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigurationError(f"env.name: math cannot be imported ({error}); pip install math-verify") from error
        # Its own time limits are whole seconds and use the one alarm that ours needs; it warns that they are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library = math_verify
        self._parse_answer = lru_cache(maxsize=ANSWERS_KEPT)(self._parse_answer_anew)

    def score(self, item: ScoringItem) -> Score:
        """Score a response.

        Raises:
            ValueError: The record's answer is no mathematics.
        """
        answer = self._parse_answer(str(item.record["answer"]))
        found = self._library.parse(item.response, parsing_timeout=None)
        is_correct = bool(self._library.verify(answer, found, timeout_seconds=None))
        return Score(float(is_correct), is_correct)

    def _parse_answer_anew(self, answer: str) -> list[Any]:
        marked = answer if any(mark in answer for mark in LATEX_MARKS) else rf"\boxed{{{answer}}}"
        parsed: list[Any] = self._library.parse(marked, parsing_timeout=None)
        if not parsed:
            raise ValueError(f"the record's answer cannot be read as mathematics: {answer!r}")
        return parsed

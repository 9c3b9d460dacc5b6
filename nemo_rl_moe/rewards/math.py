# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers, compared for equality by the math-verify library."""

import logging
import re
from functools import lru_cache
from typing import Any

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score, ScoringItem

# What shows the library where mathematics begins. Data sets hold bare answers without it, such as \frac{1}{2}, and in
# these an escaped sign is one of money, and \\[2pt] a line of a matrix.
_LATEX_MARK = re.compile(r"(?:^|[^\\])(?:\\\\)*(?:\$|\\\(|\\\[)|\\boxed")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
# Between boxes that are one answer together.
_BETWEEN = re.compile(r"[\s,;$]*(?:and|or)?[\s,;$]*")
_LONGEST_BETWEEN = 40
ANSWERS_KEPT = 1024


class MathReward:
    r"""Comparison of the last answer in a response, such as `\boxed{\frac{1}{2}}`, `$0.5$` or `1/2`, with the record's.

    The reward is 1 for the same value and 0 otherwise; a response without mathematics is wrong. Of several boxes the
    last counts, with boxes before it that only a comma, "and" or "or" separates from it.

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
        found = self._library.parse(from_last_boxes(item.response), parsing_timeout=None)
        is_correct = bool(self._library.verify(answer, found, timeout_seconds=None))
        return Score(float(is_correct), is_correct)

    def _parse_answer_anew(self, answer: str) -> list[Any]:
        marked = answer if _LATEX_MARK.search(answer) else rf"\boxed{{{answer}}}"
        parsed: list[Any] = self._library.parse(marked, parsing_timeout=None)
        if not parsed:
            raise ValueError(f"the record's answer cannot be read as mathematics: {answer!r}")
        return parsed


def from_last_boxes(response: str) -> str:
    r"""Return a response from its last answer in boxes on; all of it, where it has no other.

    The library would compare the set of all boxes, those too that a later one corrects.
    """
    boxes = _boxes(response)
    first = len(boxes) - 1
    while first > 0:
        end, start = boxes[first - 1][1], boxes[first][0]
        if start - end > _LONGEST_BETWEEN or not _BETWEEN.fullmatch(response, end, start):
            break
        first -= 1
    return response[boxes[first][0] :] if first > 0 else response


def _boxes(response: str) -> list[tuple[int, int]]:
    """Return the places of the boxes that are closed, without those inside another."""
    found: list[tuple[int, int]] = []
    opened: list[int | None] = []
    for brace in _BRACES.finditer(response):
        if brace[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, brace.end()))
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append(None if brace[0] == "{" else brace.start())
    return found

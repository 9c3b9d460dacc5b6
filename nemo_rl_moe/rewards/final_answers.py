# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
r"""Final answers in texts: after GSM8K's `####`, in the last `\boxed{...}`, or as the letter of a choice."""

import re
from collections.abc import Sequence

from nemo_rl_moe.rewards.interface import ScoringItem

# Separates the working from the answer in GSM8K.
_WORKED = re.compile(r"^[ \t]*####(?!#)", re.MULTILINE)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
# Between boxes that are one answer together.
_BETWEEN = re.compile(r"[\s,;$]*(?:and|or)?[\s,;$]*")
_LONGEST_BETWEEN = 40
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-J])[).:]?")
_STATED = re.compile(r"\banswer\s*(?:is|:)[:*_(\s]*([A-J])\b", re.IGNORECASE)


def gold_answer(item: ScoringItem) -> str:
    """Return the record's final answer: the part after its last `####` at the start of a line, or all of it.

    Raises:
        ValueError: The record has no answer.
    """
    answer = item.record["answer"]
    if answer is None:
        raise ValueError(f"{item.sample_id}: the record's answer is null: there is nothing to compare a response with")
    return _WORKED.split(str(answer))[-1].strip()


def choice_in(text: str) -> str | None:
    r"""Return the letter of a choice, A to J, that a text is: `B`, `(B)`, `B.` or `\text{B}`; None: it is none."""
    found = _CHOICE.fullmatch(_plain(text).strip(" \n$*"))
    return found[1] if found else None


def stated_choice(response: str) -> str | None:
    """Return the letter of the choice that a response states, last box first; None: it states none.

    A response states `B` if it is `B` and nothing else, or if `B` follows its last "answer is" or "answer:".
    """
    if closed_boxes(response):
        return choice_in(last_box(response) or "")
    # Any case for the words, upper case alone for the letter: "the answer is a cat" states none.
    stated = [letter for letter in _STATED.findall(response) if letter.isupper()]
    return stated[-1] if stated else choice_in(response)


def boxes_the_words(response: str, gold: str) -> bool:
    r"""Return True if the last box holds the words of the gold answer, with or without `\text{}` around them.

    math-verify takes words outside `\text{}` for products of letters.
    """
    boxed = last_box(response)
    return boxed is not None and _plain(boxed).split() == _plain(gold).split()


def _plain(text: str) -> str:
    r"""Return a text without LaTeX's marks of plain text, such as `\text{...}`."""
    return _STYLE.sub(r"\1", text)


def from_last_boxes(response: str) -> str:
    r"""Return a response from its last answer in boxes on; all of it, where it has no other.

    math-verify would compare the set of all boxes, those too that a later one corrects.
    """
    boxes = closed_boxes(response)
    last = _last_answer(response, boxes)
    return response[last[0][0] :] if len(last) < len(boxes) else response


def last_box(text: str) -> str | None:
    """Return the content of the last answer in boxes; None: there is none, or it is several boxes."""
    last = _last_answer(text, closed_boxes(text))
    return text[text.index("{", last[0][0]) + 1 : last[0][1] - 1] if len(last) == 1 else None


def _last_answer(text: str, boxes: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the last of the boxes, with boxes before it that are one answer with it."""
    first = len(boxes) - 1
    while first > 0:
        end, start = boxes[first - 1][1], boxes[first][0]
        if start - end > _LONGEST_BETWEEN or not _BETWEEN.fullmatch(text, end, start):
            break
        first -= 1
    return boxes[max(first, 0) :]


def closed_boxes(text: str) -> list[tuple[int, int]]:
    """Return the places of the boxes that are closed, without those inside another."""
    found: list[tuple[int, int]] = []
    opened: list[int | None] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, brace.end()))
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append(None if brace[0] == "{" else brace.start())
    return found

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
r"""Final answers in texts: after GSM8K's `####`, in the last `\boxed{...}`, or as the letter of a choice."""

import re
from collections.abc import Sequence
from decimal import Decimal

from nemo_rl_moe.rewards.interface import ScoringItem

# Separates the derivation from the answer in GSM8K.
_WORKED = re.compile(r"^[ \t]*####(?!#)", re.MULTILINE)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
# Text between two boxes that form one answer.
_BETWEEN = re.compile(r"[\s,;$]*(?:and|or)?[\s,;$]*")
_LONGEST_BETWEEN = 40
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-J])[).:]?")
# The letter of a choice before its text, as in `(A) 12`.
_LABEL = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])[\s~\\]*(?![\s~\\,;/&]|(?:and|or)\b)(?!.*\([A-J]\))", re.DOTALL)
_STATED = re.compile(r"\banswer\s*(?:is|:)[:*_($\s]*(?:(?:choice|option)[:*_($\s]*)?([A-J])\b", re.IGNORECASE)
_ANOTHER = re.compile(
    r"[).:*_$\s]*(?:[,;/&]|\b(?:and|or)\b)[*_($\s]*(?:(?:and|or)\b[*_($\s]*)?(?:[A-HJ]|I(?! [a-z]))\b(?!'| is\b)"
)
SEVERAL = "several"
"""Result of `stated_choice` for a response that states several choices."""
_SAID = re.compile(r"\banswer\s*(?:is|:)[:*_\s]*(\S.*)", re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,3}|inf|infinity|.*\b(?:and|or)\b.*")
_SHOWN_WORDS = re.compile(r"(\$|\\boxed\s*\{)\s*([^\W\d_]{2,}(?: [^\W\d_]+)*)\s*(?=[$}])")
# 1e3, 1e-3 and 2.5e-3 are numbers, but 2e-3 may mean twice e minus 3.
_POWER = re.compile(r"(?<![\w.])(?:\d+(?:\.\d+)?[eE]\+?|(?:1|\d+\.\d+)[eE]-)\d{1,2}(?![\w.]\w|\w)")
_MIXED = re.compile(
    r"(?:^|(?<=[{$(=:])|(?<=\bis))(\s*-?)(\d{1,15})\s+(\d{1,15})\s*/\s*([1-9]\d{0,14})\s*(?=\.?\s*$|[}$),\\])"
)
_STOP = re.compile(r"(?<=\d)\.(?=\s*(?:[}$]|$))")


def gold_answer(item: ScoringItem) -> str:
    r"""Return the record's final answer: after its last `####` at the start of a line, or in its last `\boxed{...}`.

    Without either, the final answer is the entire answer. If there are several boxes, the last one counts, as in a
    response.

    Raises:
        ValueError: The record has no answer.
    """
    answer = item.record["answer"]
    if answer is None:
        raise ValueError(f"{item.sample_id}: the record's answer is null: there is nothing to compare a response with")
    final = _WORKED.split(str(answer))[-1].strip()
    return (last_box(final) or from_last_boxes(final)).strip()


def choice_in(text: str) -> str | None:
    r"""Return the letter of a choice, A to J, if a text only consists of it: `B`, `(B)`, `B.` or `\text{B}`, else
    None."""
    found = _CHOICE.fullmatch(_plain(text).strip(" \n$*"))
    return found[1] if found else None


def stated_choice(response: str) -> str | None:
    r"""Return the letter of the choice that a response states, or None.

    If a response has boxes, the last box must contain the letter, alone or before the choice's text, such as
    `\textbf{(B)}\ 12`. Without a box, a response states `B` if it only consists of `B`, or if `B` follows its last
    "answer is" or "answer:". If further letters follow this letter, the result is `SEVERAL`.
    """
    if closed_boxes(response):
        boxed = _plain(last_box(response) or "").strip(" \n$*~\\")
        label = _LABEL.match(boxed)
        return choice_in(boxed) or (label[1] or label[2] if label else None)
    shown = _plain(response)
    # The words may have any case, but the letter must be upper case: "the answer is a cat" states no choice.
    stated = [found for found in _STATED.finditer(shown) if found[1].isupper()]
    if not stated:
        return choice_in(response)
    return SEVERAL if _ANOTHER.match(shown, stated[-1].end()) else stated[-1][1]


def are_words(answer: str) -> bool:
    r"""Return whether an answer consists of words, such as `DACB` or `\text{no solution}`.

    math-verify would read bare words as products of letters, so that `DACB` would equal `ABCD`. The result is False
    for two or three lower-case consonants, such as `xy`, which are a product, and for several answers, joined by `and`
    or `or`.
    """
    words = " ".join(_bare(answer).split())
    return _WORDS.fullmatch(words) is not None and max(map(len, words.split())) > 1 and not _PRODUCT.fullmatch(words)


def states_the_words(response: str, gold: str) -> bool:
    r"""Return whether a response's last box contains the words of the gold answer, with or without `\text{}`.

    The case of words is ignored. A response without a box states the words if it consists of them, or if they are the
    rest of the line after its last "answer is" or "answer:".
    """
    boxed = last_box(response)
    if not are_words(gold):
        return boxed is not None and _plain(boxed).split() == _plain(gold).split()
    stated = [boxed]
    if not closed_boxes(response):
        said = _SAID.findall(response)
        stated = [response, *said[-1:]]
    wanted = _bare(gold).casefold().split()
    return any(text is not None and _bare(text).casefold().split() == wanted for text in stated)


def with_words_marked(text: str) -> str:
    r"""Return a text in which bare words in boxes and between dollars are wrapped in `\text{...}`, so that they are not
    read as products of letters."""
    return _SHOWN_WORDS.sub(r"\1\\text{\2}", text)


def with_numbers_written_out(text: str) -> str:
    """Return a text with `1e3` replaced by `1000`, the mixed number `3 1/2` by `7/2`, and `5.` at the end by `5`."""
    plain = _POWER.sub(lambda found: format(Decimal(found[0]), "f"), _STOP.sub("", text))
    return _MIXED.sub(lambda found: f"{found[1]}{int(found[2]) * int(found[4]) + int(found[3])}/{found[4]}", plain)


def _bare(text: str) -> str:
    """Return a text without LaTeX's marks of plain text, and without dollars, asterisks and full stops around it."""
    return _plain(text.strip(" \n$*.")).strip(" \n$*.")


def _plain(text: str) -> str:
    r"""Return a text without LaTeX's marks of plain text, such as `\text{...}`."""
    return _STYLE.sub(r"\1", text)


def from_last_boxes(response: str) -> str:
    r"""Return the end of a response, beginning at its last boxed answer. Without an earlier box, return the response.

    math-verify would compare the set of all boxes, including boxes that a later box corrects.
    """
    boxes = closed_boxes(response)
    last = _last_answer(response, boxes)
    return response[last[0][0] :] if len(last) < len(boxes) else response


def last_box(text: str) -> str | None:
    """Return the content of the last box. None if there is no box, or if several boxes form the last answer."""
    last = _last_answer(text, closed_boxes(text))
    return text[text.index("{", last[0][0]) + 1 : last[0][1] - 1] if len(last) == 1 else None


def _last_answer(text: str, boxes: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return the positions of the last box and of the boxes before it that belong to the same answer."""
    first = len(boxes) - 1
    while first > 0:
        end, start = boxes[first - 1][1], boxes[first][0]
        if start - end > _LONGEST_BETWEEN or not _BETWEEN.fullmatch(text, end, start):
            break
        first -= 1
    return boxes[max(first, 0) :]


def closed_boxes(text: str) -> list[tuple[int, int]]:
    """Return start and end position of each `\\boxed{...}` that is closed and not inside of another closed one."""
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

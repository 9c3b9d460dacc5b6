# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
r"""Final answers in texts: after GSM8K's `####`, in the last `\boxed{...}`, or as the letter of a choice."""

import re
from collections.abc import Sequence
from decimal import Decimal

from nemo_rl_moe.rewards.interface import ScoringItem

# Separates the working from the answer in GSM8K.
_WORKED = re.compile(r"^[ \t]*####(?!#)", re.MULTILINE)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
# Between boxes that are one answer together.
_BETWEEN = re.compile(r"[\s,;$]*(?:and|or)?[\s,;$]*")
_LONGEST_BETWEEN = 40
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-J])[).:]?")
# A letter in front of its choice's text, as in `(A) 12`.
_LABEL = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])[\s~\\]*(?![\s~\\,;/&]|(?:and|or)\b)(?!.*\([A-J]\))", re.DOTALL)
_STATED = re.compile(r"\banswer\s*(?:is|:)[:*_($\s]*(?:(?:choice|option)[:*_($\s]*)?([A-J])\b", re.IGNORECASE)
_ANOTHER = re.compile(
    r"[).:*_$\s]*(?:[,;/&]|\b(?:and|or)\b)[*_($\s]*(?:(?:and|or)\b[*_($\s]*)?(?:[A-HJ]|I(?! [a-z]))\b(?!'| is\b)"
)
SEVERAL = "several"
"""What a response states that names several choices."""
_SAID = re.compile(r"\banswer\s*(?:is|:)[:*_\s]*(\S.*)", re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,3}|inf|infinity|.*\b(?:and|or)\b.*")
_SHOWN_WORDS = re.compile(r"(\$|\\boxed\s*\{)\s*([^\W\d_]{2,}(?: [^\W\d_]+)*)\s*(?=[$}])")
# 1e3, and 1e-3 or 2.5e-3: 2e-3 is also twice e, less 3.
_POWER = re.compile(r"(?<![\w.])(?:\d+(?:\.\d+)?[eE]\+?|(?:1|\d+\.\d+)[eE]-)\d{1,2}(?![\w.]\w|\w)")
_MIXED = re.compile(
    r"(?:^|(?<=[{$(=:])|(?<=\bis))(\s*-?)(\d{1,15})\s+(\d{1,15})\s*/\s*([1-9]\d{0,14})\s*(?=\.?\s*$|[}$),\\])"
)
_STOP = re.compile(r"(?<=\d)\.(?=\s*(?:[}$]|$))")


def gold_answer(item: ScoringItem) -> str:
    r"""Return the record's final answer: after its last `####` at the start of a line or in its last `\boxed{...}`.

    Without either it is all of the answer. Of several boxes the last counts, as in a response.

    Raises:
        ValueError: The record has no answer.
    """
    answer = item.record["answer"]
    if answer is None:
        raise ValueError(f"{item.sample_id}: the record's answer is null: there is nothing to compare a response with")
    final = _WORKED.split(str(answer))[-1].strip()
    return (last_box(final) or from_last_boxes(final)).strip()


def choice_in(text: str) -> str | None:
    r"""Return the letter of a choice, A to J, that a text is: `B`, `(B)`, `B.` or `\text{B}`; None: it is none."""
    found = _CHOICE.fullmatch(_plain(text).strip(" \n$*"))
    return found[1] if found else None


def stated_choice(response: str) -> str | None:
    r"""Return the letter of the choice that a response states, last box first; None: it states none.

    A box states `B` if it holds the letter, alone or before the choice's text, such as `\textbf{(B)}\ 12`. Without a
    box a response states `B` if it is `B` and nothing else, or if `B` follows its last "answer is" or "answer:".
    `SEVERAL`: other letters stand behind that one.
    """
    if closed_boxes(response):
        boxed = _plain(last_box(response) or "").strip(" \n$*~\\")
        label = _LABEL.match(boxed)
        return choice_in(boxed) or (label[1] or label[2] if label else None)
    shown = _plain(response)
    # Any case for the words, upper case alone for the letter: "the answer is a cat" states none.
    stated = [found for found in _STATED.finditer(shown) if found[1].isupper()]
    if not stated:
        return choice_in(response)
    return SEVERAL if _ANOTHER.match(shown, stated[-1].end()) else stated[-1][1]


def are_words(answer: str) -> bool:
    r"""Return True for an answer that is words of letters, such as `DACB` or `\text{no solution}`.

    Mathematics would take bare words for products of letters, and so `DACB` for `ABCD`. Two or three small consonants,
    such as `xy`, are a product, and what `and` or `or` joins is several answers.
    """
    words = " ".join(_bare(answer).split())
    return _WORDS.fullmatch(words) is not None and max(map(len, words.split())) > 1 and not _PRODUCT.fullmatch(words)


def states_the_words(response: str, gold: str) -> bool:
    r"""Return True if a response's last box holds the words of the gold answer, with or without `\text{}` around them.

    Words of letters count without their case, and also if a response without a box is them alone, or they follow its
    last "answer is" or "answer:" on the line.
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
    r"""Return a text with bare words in boxes and between dollars as `\text{...}`, not as products of letters."""
    return _SHOWN_WORDS.sub(r"\1\\text{\2}", text)


def with_numbers_written_out(text: str) -> str:
    """Return a text with `1e3` as `1000`, the mixed number `3 1/2` as `7/2`, and `5.` at an end as `5`."""
    plain = _POWER.sub(lambda found: format(Decimal(found[0]), "f"), _STOP.sub("", text))
    return _MIXED.sub(lambda found: f"{found[1]}{int(found[2]) * int(found[4]) + int(found[3])}/{found[4]}", plain)


def _bare(text: str) -> str:
    """Return a text without marks of plain text and of mathematics around it, and without its full stop."""
    return _plain(text.strip(" \n$*.")).strip(" \n$*.")


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

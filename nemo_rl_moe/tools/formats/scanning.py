# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Search for calls between marks and outside of think blocks, and reading of JSON within a text."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.data.thinking import THINK_END, THINK_START
from nemo_rl_moe.errors import json_problem
from nemo_rl_moe.tools.formats.interface import MalformedCall, Parse, ParsedCall, Schemas, ToolCall


class CallProblem(ValueError):
    """A call cannot be read. The message is written for the model.

    Args:
        read_up_to: Position at which the search for the next call continues.
    """

    def __init__(self, message: str, read_up_to: int = 0):
        super().__init__(message)
        self.read_up_to = read_up_to


MOST_MALFORMED = 20
"""Number of malformed calls after which the rest of a turn is ignored. A model that repeats itself writes thousands of
them."""
Read = Callable[[str, int, Schemas], tuple[list[ParsedCall], int]]
"""A function that reads calls, given the text, the position after an opening mark, and the schemas. It returns the
calls and the position after them, or raises `CallProblem`."""


def between_marks(opening: str | re.Pattern[str], closing: str, read: Read, *, may_stay_open: bool = False) -> Parse:
    """Return a parser for calls between two marks.

    Args:
        opening: The opening mark, or a pattern of it.
        closing: The closing mark. Empty: there is none.
        may_stay_open: Whether the closing mark may be missing at the end of a turn.
    """
    mark = re.escape(opening) if isinstance(opening, str) else opening.pattern
    next_opening = re.compile(f"(?P<think>{THINK_START})|{mark}")
    next_place = re.compile(f"(?P<closing>{re.escape(closing) or '(?!)'})|{mark}")

    def parse(text: str, schemas: Schemas) -> list[ParsedCall]:
        calls: list[ParsedCall] = []
        place, num_malformed = 0, 0
        # Limited, because each malformed call may need a search up to the end of the text.
        while num_malformed < MOST_MALFORMED and (found := next_opening.search(text, place)) is not None:
            if found["think"]:
                end = text.find(THINK_END, found.end())
                place = len(text) if end == -1 else end + len(THINK_END)
                continue
            try:
                read_calls, place = read(text, found.end(), schemas)
                if not (may_stay_open and after_blanks(text, place) == len(text)):
                    place = behind(text, place, closing)
            except CallProblem as problem:
                read_calls, num_malformed = [MalformedCall(str(problem))], num_malformed + 1
                goes_on = next_place.search(text, max(found.end(), problem.read_up_to))
                place = len(text) if goes_on is None else goes_on.end() if goes_on["closing"] else goes_on.start()
            calls += read_calls
        return calls

    return parse


def after_blanks(text: str, place: int) -> int:
    """Return the position of the first character from `place` on that is not blank, or the end of the text."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def behind(text: str, place: int, mark: str) -> int:
    """Return the position after `mark`. Only blanks may be between `place` and the mark.

    Raises:
        CallProblem: The mark is missing.
    """
    place = after_blanks(text, place)
    if not text.startswith(mark, place):
        found = repr(shortened(text[place : place + 40])) if place < len(text) else "the end of the turn"
        raise CallProblem(f"expected {mark} before {found}")
    return place + len(mark)


def read_json(text: str, place: int) -> tuple[Any, int]:
    """Read the JSON value at `place`, and return it with the position after it. Raises `CallProblem` if it is
    invalid."""
    place = after_blanks(text, place)
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        near = shortened(text[error.pos : error.pos + 20])
        raise CallProblem(
            f"invalid JSON: {json_problem(error)} at {near!r}, character {error.pos - place + 1}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CallProblem(f"invalid JSON: {str(error)[:100]}") from None


def call_of(value: object) -> ToolCall:
    """Return the call that an object with name and arguments describes. Raises `CallProblem` for other values."""
    if not isinstance(value, Mapping):
        raise CallProblem("expected an object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise CallProblem('the call has no "name", the name of a tool')
    return ToolCall(name, arguments_of(value.get("arguments", value.get("parameters", {}))))


def arguments_of(value: object) -> Mapping[str, object]:
    """Return the arguments of a call. Some models write them as JSON in a string.

    Raises:
        CallProblem: The arguments are not an object.
    """
    if isinstance(value, str):
        value, _ = read_json(value, 0)
    if not isinstance(value, Mapping):
        raise CallProblem("the arguments are no object, expected an argument's value by its name")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(digits: str) -> float:
    return float(digits) if math.isfinite(float(digits)) else _refuse(digits)


# Not strict, because models write line breaks into strings.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, strict=False)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Search for calls between marks, outside of think blocks, and JSON within a text."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import json_problem
from nemo_rl_moe.tools.formats.interface import (
    THINK_END,
    THINK_START,
    MalformedCall,
    Parse,
    ParsedCall,
    Schemas,
    ToolCall,
)


class CallProblem(ValueError):
    """A call cannot be read; the message is for the model."""


Read = Callable[[str, int, Schemas], tuple[list[ParsedCall], int]]
"""From a text and the place behind an opening mark to calls and the place behind them; raises `CallProblem`."""


def between_marks(opening: str, closing: str, read: Read) -> Parse:
    """Make the parser of calls that stand between two marks.

    Args:
        closing: May be empty.
    """

    def parse(text: str, schemas: Schemas) -> list[ParsedCall]:
        calls: list[ParsedCall] = []
        place = 0
        while (start := _next_opening(text, opening, place)) is not None:
            try:
                found, place = read(text, start, schemas)
                place = behind(text, place, closing)
            except CallProblem as problem:
                found = [MalformedCall(str(problem))]
                place = _next_place(text, start, opening, closing)
            calls += found
        return calls

    return parse


def _next_opening(text: str, opening: str, place: int) -> int | None:
    """Return the place behind the next opening mark that is no part of a think block."""
    while True:
        start, thinking = text.find(opening, place), text.find(THINK_START, place)
        if start == -1:
            return None
        if thinking == -1 or start < thinking:
            return start + len(opening)
        end = text.find(THINK_END, thinking)
        if end == -1:
            return None
        place = end + len(THINK_END)


def _next_place(text: str, start: int, opening: str, closing: str) -> int:
    """Return the place at which the search goes on behind a malformed call."""
    closed = text.find(closing, start) if closing else -1
    opened = text.find(opening, start)
    if closed != -1 and (opened == -1 or closed < opened):
        return closed + len(closing)
    return opened if opened != -1 else len(text)


def behind(text: str, place: int, mark: str) -> int:
    """Return the place behind a mark, before which only blanks may stand.

    Raises:
        CallProblem: Something else stands there.
    """
    while place < len(text) and text[place].isspace():
        place += 1
    if not text.startswith(mark, place):
        found = repr(shortened(text[place : place + 40])) if place < len(text) else "the end of the turn"
        raise CallProblem(f"expected {mark} before {found}")
    return place + len(mark)


def read_json(text: str, place: int) -> tuple[Any, int]:
    """Read JSON that begins at a place, and return it with the place behind it.

    Raises:
        CallProblem: There is none.
    """
    while place < len(text) and text[place].isspace():
        place += 1
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
    """Return the call that an object of name and arguments is.

    Raises:
        CallProblem: It is something else.
    """
    if not isinstance(value, Mapping):
        raise CallProblem("expected an object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise CallProblem('the call has no "name", the name of a tool')
    return ToolCall(name, arguments_of(value.get("arguments", value.get("parameters", {}))))


def arguments_of(value: object) -> Mapping[str, object]:
    """Return arguments, which some models write as JSON in a string.

    Raises:
        CallProblem: They are no object.
    """
    if isinstance(value, str):
        value, _ = read_json(value, 0)
    if not isinstance(value, Mapping):
        raise CallProblem("the arguments are no object, expected an argument's value by its name")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse, strict=False)  # models write line breaks into texts

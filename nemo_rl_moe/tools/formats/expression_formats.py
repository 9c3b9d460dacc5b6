# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats whose calls are expressions, such as `tool(argument="value")`."""

import ast
import json
import re
import warnings

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import CallProblem, after_blanks, behind, between_marks, read_json

_OPENING, _CLOSING = "<function_calls>", "</function_calls>"
_EXAMPLE = 'tool(argument="value")'
_NAME = re.compile(r"[\s,]*([^\s()\[\]{}<>=,\"']+)\(")
_KEY = re.compile(r"\s*([^\s()\[\]{}<>=,\"']+)\s*=")
_PART = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[()\[\]{},\"']", re.DOTALL)


def _one_a_line(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    """Read calls up to the closing mark. At least one call must be there."""
    calls: list[ParsedCall] = []
    while not calls or not text.startswith(_CLOSING, after_blanks(text, place)):
        name = _NAME.match(text, place)
        if name is None:
            raise CallProblem(f"expected a call such as {_EXAMPLE} before {shortened(text[place : place + 40])!r}")
        arguments, place = _arguments(text, name.end())
        calls.append(ToolCall(name[1], arguments))
    return calls, place


def _arguments(text: str, place: int) -> tuple[dict[str, object], int]:
    arguments: dict[str, object] = {}
    while not text.startswith(")", after_blanks(text, place)):
        key = _KEY.match(text, place)
        if key is None:
            raise CallProblem(f"expected argument=value or ) before {shortened(text[place : place + 40])!r}")
        end = _end_of_value(text, key.end())
        arguments[key[1]] = _value(text[key.end() : end].strip())
        place = end + text.startswith(",", end)
    return arguments, behind(text, place, ")")


def _end_of_value(text: str, place: int) -> int:
    """Return the position of the comma or the closing parenthesis after the value that begins at `place`."""
    depth = 0
    for part in _PART.finditer(text, place):
        if part[0] in ('"', "'"):
            raise CallProblem(f"expected {part[0]} before the end of the turn")
        if not depth and part[0] in (",", ")"):
            return part.start()
        depth += (part[0] in ("(", "[", "{")) - (part[0] in (")", "]", "}"))
    raise CallProblem("expected ) before the end of the turn")


def _value(text: str) -> object:
    """Return the value of a JSON text or a Python literal, as a JSON value."""
    try:
        value, end = read_json(text, 0)
    except CallProblem:
        return _value_of_literal(text)
    return value if end == len(text) else _value_of_literal(text)


def _value_of_literal(text: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes without an escape sequence
            literal = json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise CallProblem(f"{shortened(text)!r} is no value of JSON") from None
    return read_json(literal, 0)[0]


OLMO3 = ToolFormat(between_marks(_OPENING, _CLOSING, _one_a_line), f"{_OPENING}{_EXAMPLE}{_CLOSING}")

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats whose calls are expressions: `tool(argument="value")`."""

import ast
import json
import re
import warnings

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import CallProblem, behind, between_marks, read_json

_OPENING, _CLOSING = "<function_calls>", "</function_calls>"
_EXAMPLE = 'tool(argument="value")'
_BLANKS = re.compile(r"\s*")
_NAME = re.compile(r"[\s,]*([^\s()\[\]{}<>=,\"']+)\(")
_KEY = re.compile(r"\s*([^\s()\[\]{}<>=,\"']+)\s*=")
_PART = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[()\[\]{},\"']", re.DOTALL)


def _one_a_line(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    """Read calls up to the closing mark; at least one."""
    calls: list[ParsedCall] = []
    while not calls or not _stands_next(text, place, _CLOSING):
        name = _NAME.match(text, place)
        if name is None:
            raise CallProblem(f"expected a call such as {_EXAMPLE} before {shortened(text[place : place + 40])!r}")
        arguments, place = _arguments(text, name.end())
        calls.append(ToolCall(name[1], arguments))
    return calls, place


def _stands_next(text: str, place: int, mark: str) -> bool:
    blanks = _BLANKS.match(text, place)
    return text.startswith(mark, place if blanks is None else blanks.end())


def _arguments(text: str, place: int) -> tuple[dict[str, object], int]:
    """Read arguments, and return them with the place behind their bracket."""
    arguments: dict[str, object] = {}
    while not _stands_next(text, place, ")"):
        key = _KEY.match(text, place)
        if key is None:
            raise CallProblem(f"expected argument=value or ) before {shortened(text[place : place + 40])!r}")
        end = _end_of_value(text, key.end())
        arguments[key[1]] = _value(text[key.end() : end].strip())
        place = end + text.startswith(",", end)
    return arguments, behind(text, place, ")")


def _end_of_value(text: str, place: int) -> int:
    """Return the place of the comma or the bracket behind a value."""
    depth = 0
    for part in _PART.finditer(text, place):
        if part[0] in ('"', "'"):
            raise CallProblem(f"expected {part[0]} before the end of the turn")
        if not depth and part[0] in (",", ")"):
            return part.start()
        depth += (part[0] in ("(", "[", "{")) - (part[0] in (")", "]", "}"))
    raise CallProblem("expected ) before the end of the turn")


def _value(text: str) -> object:
    """Return the value that JSON means, or a literal of Python as a value of JSON."""
    try:
        value, end = read_json(text, 0)
    except CallProblem:
        return _value_of_literal(text)
    return value if end == len(text) else _value_of_literal(text)


def _value_of_literal(text: str) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes that Python takes as they are
            literal = json.dumps(ast.literal_eval(text), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise CallProblem(f"{shortened(text)!r} is no value of JSON") from None
    return read_json(literal, 0)[0]


OLMO3 = ToolFormat(between_marks(_OPENING, _CLOSING, _one_a_line), f"{_OPENING}{_EXAMPLE}{_CLOSING}")

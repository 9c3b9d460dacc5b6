# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats whose calls are JSON."""

import json
import re
from collections.abc import Sequence

from nemo_rl_moe.tools.formats.interface import MalformedCall, ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import CallProblem, arguments_of, behind, between_marks, call_of, read_json

_ARGUMENTS = '{"argument": "value"}'
_OBJECT = f'{{"name": "tool", "arguments": {_ARGUMENTS}}}'
_WIDE_BAR = "\uff5c"
"""Stands in DeepSeek's special tokens."""
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR = (
    f"<{_WIDE_BAR}{name}{_WIDE_BAR}>"
    for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
)
_TYPE_AND_NAME = re.compile(rf"\s*\w+{_SEPARATOR}([^\s<]+)\s*```json\s*")
_NAME_BEFORE_SEPARATOR = re.compile(rf"\s*([^\s<]+){_SEPARATOR}")
_NAME_BEFORE_ARGS = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]")
_IS_A_CALL = re.compile(r'"name"\s*:(?s:.*)"(?:parameters|arguments)"\s*:')


def _one(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    """Read one object."""
    value, end = read_json(text, place)
    return [call_of(value)], end


def _several(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    """Read a list of objects."""
    value, end = read_json(text, place)
    if not isinstance(value, list):
        raise CallProblem("expected a list of objects with name and arguments")
    return _each(value), end


def _each(values: Sequence[object]) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    for value in values:
        try:
            calls.append(call_of(value))
        except CallProblem as problem:
            calls.append(MalformedCall(str(problem)))
    return calls


def _named(pattern: re.Pattern[str], expected: str, text: str, place: int) -> tuple[ToolCall, int]:
    """Read the name that a pattern finds, and the arguments behind it."""
    found = pattern.match(text, place)
    if found is None:
        raise CallProblem(f"expected {expected}")
    value, end = read_json(text, found.end())
    return ToolCall(found[1], arguments_of(value)), end


def _in_a_block(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    call, end = _named(_TYPE_AND_NAME, f"function{_SEPARATOR} and the name of a tool", text, place)
    return [call], behind(text, end, "```")


def _behind_separator(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    call, end = _named(_NAME_BEFORE_SEPARATOR, f"the name of a tool and {_SEPARATOR}", text, place)
    return [call], end


def _behind_args(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    call, end = _named(_NAME_BEFORE_ARGS, "the name of a tool and [ARGS]", text, place)
    return [call], end


def _parse_bare(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Parse a turn that is one object, or several with semicolons in between; what has no name is an answer."""
    text = text.strip().removeprefix("<|python_tag|>").lstrip()
    calls: list[ParsedCall] = []
    if not text.startswith("{") or not _IS_A_CALL.search(text):
        return calls
    place = 0
    try:
        while True:
            value, place = read_json(text, place)
            calls.append(call_of(value))
            rest = text[place:].lstrip()
            if not rest.startswith(";"):
                return calls
            place = len(text) - len(rest) + 1
    except CallProblem as problem:
        return [*calls, MalformedCall(str(problem))]


HERMES = ToolFormat(between_marks("<tool_call>", "</tool_call>", _one), f"<tool_call>\n{_OBJECT}\n</tool_call>")
FUNCTION_CALLS = ToolFormat(
    between_marks("<function_calls>", "</function_calls>", _several), f"<function_calls>[{_OBJECT}]</function_calls>"
)
MISTRAL = ToolFormat(between_marks("[TOOL_CALLS]", "", _several), f"[TOOL_CALLS] [{_OBJECT}]")
MISTRAL_ARGS = ToolFormat(between_marks("[TOOL_CALLS]", "", _behind_args), f"[TOOL_CALLS]tool[ARGS]{_ARGUMENTS}")
DEEPSEEK_V3 = ToolFormat(
    between_marks(_CALL_BEGIN, _CALL_END, _in_a_block),
    f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}tool\n```json\n{_ARGUMENTS}\n```{_CALL_END}{_CALLS_END}",
)
DEEPSEEK_V31 = ToolFormat(
    between_marks(_CALL_BEGIN, _CALL_END, _behind_separator),
    f"{_CALLS_BEGIN}{_CALL_BEGIN}tool{_SEPARATOR}{_ARGUMENTS}{_CALL_END}{_CALLS_END}",
)
LLAMA3_JSON = ToolFormat(_parse_bare, json.dumps({"name": "tool", "parameters": {"argument": "value"}}))

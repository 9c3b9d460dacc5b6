# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats whose calls are JSON."""

import json
import re
from collections.abc import Mapping, Sequence

from nemo_rl_moe.tools.formats.interface import MalformedCall, ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import (
    CallProblem,
    Read,
    arguments_of,
    behind,
    between_marks,
    call_of,
    read_json,
)

_ARGUMENTS = '{"argument": "value"}'
_OBJECT = f'{{"name": "tool", "arguments": {_ARGUMENTS}}}'
_WIDE_BAR = "\uff5c"
"""Part of DeepSeek's special tokens."""
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR = (
    f"<{_WIDE_BAR}{name}{_WIDE_BAR}>"
    for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
)
_TYPE_AND_NAME = re.compile(rf"\s*\w+{_SEPARATOR}([^\s<]+)\s*```json\s*")
_NAME_BEFORE_SEPARATOR = re.compile(rf"\s*([^\s<]+){_SEPARATOR}")
_NAME_BEFORE_ARGS = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\]|(?={))")
_KIMI_CALL_BEGIN, _KIMI_ARGUMENTS, _KIMI_CALL_END = (
    f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end")
)
_KIMI_NAME = re.compile(rf"\s*(?:functions\.)?([^\s:<]+):\d+\s*{re.escape(_KIMI_ARGUMENTS)}")
_NAME_KEY, _ARGUMENTS_KEY = re.compile(r'"name"\s*:'), re.compile(r'"(?:parameters|arguments)"\s*:')


def _one(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    value, end = read_json(text, place)
    return [call_of(value)], end


def _several(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    """Read a list of objects, or one object."""
    value, end = read_json(text, place)
    if not isinstance(value, list | Mapping):
        raise CallProblem("expected a list of objects with name and arguments")
    return _each(value if isinstance(value, list) else [value]), end


def _each(values: Sequence[object]) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    for value in values:
        try:
            calls.append(call_of(value))
        except CallProblem as problem:
            calls.append(MalformedCall(str(problem)))
    return calls


def _named(pattern: re.Pattern[str], expected: str, end_mark: str = "") -> Read:
    """Return a function that reads a call: the name that `pattern` finds, the arguments after the name, and `end_mark`
    after the arguments."""

    def read(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
        found = pattern.match(text, place)
        if found is None:
            raise CallProblem(f"expected {expected}")
        value, end = read_json(text, found.end())
        return [ToolCall(found[1], arguments_of(value))], behind(text, end, end_mark)

    return read


def _bare(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    """Read the JSON object that begins at `place - 1`. It is a call if it has a name and parameters, else a part of the
    answer."""
    begin = place - 1
    try:
        value, end = read_json(text, begin)
    except CallProblem as problem:
        name = _NAME_KEY.search(text, begin)
        is_a_call = name is not None and _ARGUMENTS_KEY.search(text, name.end()) is not None
        return ([MalformedCall(str(problem))] if is_a_call else []), len(text)
    is_a_call = "name" in value and not value.keys().isdisjoint(("parameters", "arguments"))
    return (_each([value]) if is_a_call else []), end


HERMES = ToolFormat(
    between_marks("<tool_call>", "</tool_call>", _one, may_stay_open=True), f"<tool_call>\n{_OBJECT}\n</tool_call>"
)
FUNCTION_CALLS = ToolFormat(
    between_marks("<function_calls>", "</function_calls>", _several), f"<function_calls>[{_OBJECT}]</function_calls>"
)
MISTRAL = ToolFormat(between_marks("[TOOL_CALLS]", "", _several), f"[TOOL_CALLS] [{_OBJECT}]")
MISTRAL_ARGS = ToolFormat(
    between_marks("[TOOL_CALLS]", "", _named(_NAME_BEFORE_ARGS, "the name of a tool and [ARGS]")),
    f"[TOOL_CALLS]tool[ARGS]{_ARGUMENTS}",
)
DEEPSEEK_V3 = ToolFormat(
    between_marks(
        _CALL_BEGIN, _CALL_END, _named(_TYPE_AND_NAME, f"function{_SEPARATOR} and the name of a tool", "```")
    ),
    f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}tool\n```json\n{_ARGUMENTS}\n```{_CALL_END}{_CALLS_END}",
)
DEEPSEEK_V31 = ToolFormat(
    between_marks(_CALL_BEGIN, _CALL_END, _named(_NAME_BEFORE_SEPARATOR, f"the name of a tool and {_SEPARATOR}")),
    f"{_CALLS_BEGIN}{_CALL_BEGIN}tool{_SEPARATOR}{_ARGUMENTS}{_CALL_END}{_CALLS_END}",
)
KIMI_K2 = ToolFormat(
    between_marks(
        _KIMI_CALL_BEGIN,
        _KIMI_CALL_END,
        _named(_KIMI_NAME, f"functions.NAME:NUMBER{_KIMI_ARGUMENTS} with the name of a tool"),
        may_stay_open=True,
    ),
    f"<|tool_calls_section_begin|>{_KIMI_CALL_BEGIN}functions.tool:0{_KIMI_ARGUMENTS}{_ARGUMENTS}{_KIMI_CALL_END}"
    "<|tool_calls_section_end|>",
)
LLAMA3_JSON = ToolFormat(
    between_marks("{", "", _bare), json.dumps({"name": "tool", "parameters": {"argument": "value"}})
)

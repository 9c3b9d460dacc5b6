# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats whose arguments stand in tags as they are: the schema of the tool says what is a text and what is JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import CallProblem, behind, between_marks

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_NAME = re.compile(r"\s*([^\s<>{}]+)")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _function_and_parameters(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    function = _FUNCTION.match(text, place)
    if function is None:
        raise CallProblem("expected <function=NAME> with the name of a tool")
    name, place, arguments = function[1], function.end(), dict[str, object]()
    while parameter := _PARAMETER.match(text, place):
        arguments[parameter[1]] = _value(_without_line_breaks(parameter[2]), schemas, name, parameter[1])
        place = parameter.end()
    return [ToolCall(name, arguments)], behind(text, place, "</function>")


def _name_and_pairs(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    found = _NAME.match(text, place)
    if found is None:
        raise CallProblem("expected the name of a tool behind <tool_call>")
    name, place, arguments = found[1], found.end(), dict[str, object]()
    while pair := _PAIR.match(text, place):
        key = pair[1].strip()
        arguments[key] = _value(pair[2], schemas, name, key)
        place = pair.end()
    return [ToolCall(name, arguments)], place


def _without_line_breaks(text: str) -> str:
    """Return a text without the line breaks that the tags around it have."""
    return text.removeprefix("\n").removesuffix("\n")


def _value(text: str, schemas: Schemas, name: str, parameter: str) -> object:
    """Return the value that a text means for a parameter; the text itself where it means none."""
    schema: Mapping[str, Any] = schemas.get(name, {}).get(parameter, {})
    takes_text = schema.get("type", "string") == "string" or "string" in schema.get("type", ())
    takes_null = bool(schema.get("nullable"))
    if takes_text and not (takes_null and text in ("null", "None")):
        return text
    if text.strip() in _PYTHON_WORDS:
        return _PYTHON_WORDS[text.strip()]
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    return value


QWEN3_CODER = ToolFormat(
    between_marks("<tool_call>", "</tool_call>", _function_and_parameters),
    "<tool_call>\n<function=tool>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>",
)
GLM45 = ToolFormat(
    between_marks("<tool_call>", "</tool_call>", _name_and_pairs),
    "<tool_call>tool\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
)

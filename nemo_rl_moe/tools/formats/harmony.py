# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Format of gpt-oss. A call is a message whose header names a function as the recipient."""

import re

from nemo_rl_moe.tools.formats.interface import MalformedCall, ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import CallProblem, arguments_of, read_json

_MESSAGE, _FUNCTIONS = "<|message|>", "functions."
_RECIPIENT = re.compile(r"\bto=(?!assistant\b)([^\s<]+)")  # not the assistant, to which results are addressed
_END = re.compile(r"<\|(?:end|call|return|start)\|>")


def _parse(text: str, schemas: Schemas) -> list[ParsedCall]:
    calls: list[ParsedCall] = []
    place = 0
    while (message := text.find(_MESSAGE, place)) != -1:
        recipient = _RECIPIENT.search(text, place, message)
        place = message + len(_MESSAGE)
        if recipient is not None:
            try:
                name = _function(recipient[1])
                value, place = read_json(text, place)
                calls.append(ToolCall(name, arguments_of(value)))
            except CallProblem as problem:
                calls.append(MalformedCall(str(problem)))
        end = _END.search(text, place)
        place = len(text) if end is None else end.end()
    return calls


def _function(recipient: str) -> str:
    name = recipient.removeprefix(_FUNCTIONS)
    if name == recipient or not name:
        raise CallProblem(f"there is no recipient {recipient[:100]!r}, expected {_FUNCTIONS} and the name of a tool")
    return name


HARMONY = ToolFormat(
    _parse, '<|channel|>commentary to=functions.tool <|constrain|>json<|message|>{"argument": "value"}<|call|>'
)

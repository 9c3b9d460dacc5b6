# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Formats whose arguments are unquoted texts in tags."""

import re
from dataclasses import dataclass

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.tools.formats.interface import Parse, ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.scanning import CallProblem, after_blanks, between_marks, read_json
from nemo_rl_moe.tools.formats.typed_values import kinds_of, typed_value

_DSML = "\uff5cDSML\uff5c"
_NAME = re.compile(r"\s*([^\s<>{}]+)")
_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_NEXT_OR_END = re.compile("<arg_key>|</arg_value>")


@dataclass(frozen=True)
class _Tags:
    """Tags of a format for functions and their parameters.

    If a parameter or a function has no closing tag, it ends at the next tag.

    Attributes:
        call: Opening and closing tag around functions. They are optional.
        function: Beginning of a function's tag, before its name.
        function_name: Pattern of the name and the rest of the tag.
        parameter: Beginning of a parameter's tag, before its name.
        parameter_name: Pattern of the complete tag, with a group `name`, and a group `is_text` if tags have such an
            attribute.
        has_line_breaks: Whether line breaks separate values from their tags.
    """

    call: tuple[str, str]
    function: str
    function_name: re.Pattern[str]
    function_end: str
    parameter: str
    parameter_name: re.Pattern[str]
    parameter_end: str
    has_line_breaks: bool

    def parser(self) -> Parse:
        opening = f"(?:{self.call[0]}\\s*)?{self.function}|{self.call[0]}"
        return between_marks(re.compile(opening), "", self._read)

    def _read(self, text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
        found = self.function_name.match(text, place)
        if found is None or not text.startswith(self.function, place - len(self.function)):
            raise CallProblem(f"expected {self.function} and the name of a tool")
        name, place, arguments = found["name"], found.end(), dict[str, object]()
        while parameter := self.parameter_name.match(text, place):
            value, place = self._value(text, parameter.end())
            key, is_text = parameter["name"], parameter.groupdict().get("is_text", "true")
            arguments[key] = _meaning(value, schemas, name, key, is_text=is_text == "true")
        return [ToolCall(name, arguments)], self._behind(text, place)

    def _value(self, text: str, place: int) -> tuple[str, int]:
        """Return the text of a parameter's value, and the position after its closing tag."""
        following = text.find(self.parameter, place)
        limit = len(text) if following == -1 else following
        end = text.find(self.parameter_end, place, limit)
        behind = end + len(self.parameter_end)
        if end == -1:
            ends = [text.find(mark, place, limit) for mark in (self.function_end, self.call[1])]
            end = behind = min((each for each in ends if each != -1), default=following)
        if end == -1:
            raise CallProblem(f"expected {self.parameter_end} before the end of the turn", len(text))
        value = text[place:end]
        return (value.removeprefix("\n").removesuffix("\n") if self.has_line_breaks else value), behind

    def _behind(self, text: str, place: int) -> int:
        place = after_blanks(text, place)
        if text.startswith(self.function_end, place):
            return place + len(self.function_end)
        if place < len(text) and not text.startswith((*self.call, self.function), place):
            near = shortened(text[place : place + 40])
            raise CallProblem(f"expected {self.parameter} or {self.function_end} before {near!r}", place)
        return place


def _meaning(text: str, schemas: Schemas, name: str, parameter: str, *, is_text: bool = True) -> object:
    """Return a text converted to the type of a tool's parameter. If its schema has no type, the text stays a text if
    `is_text`, else it is read as JSON."""
    kinds = kinds_of(schemas.get(name, {}).get(parameter))
    if kinds or is_text:
        return typed_value(text, kinds)
    try:
        value, end = read_json(text, 0)
    except CallProblem:
        return text
    return text if text[end:].strip() else value


def _name_and_pairs(text: str, place: int, schemas: Schemas) -> tuple[list[ParsedCall], int]:
    found = _NAME.match(text, place)
    if found is None:
        raise CallProblem("expected the name of a tool after <tool_call>")
    name, place, arguments = found[1], found.end(), dict[str, object]()
    while pair := _KEY.match(text, place):
        end = _NEXT_OR_END.search(text, pair.end())
        if end is None or end[0] == "<arg_key>":
            raise CallProblem(f"expected </arg_value> after the value of {shortened(pair[1].strip())}")
        key, place = pair[1].strip(), end.end()
        arguments[key] = _meaning(text[pair.end() : end.start()], schemas, name, key)
    return [ToolCall(name, arguments)], place


QWEN3_CODER = ToolFormat(
    _Tags(
        ("<tool_call>", "</tool_call>"),
        "<function=",
        re.compile(r"(?P<name>[^\s<>{}]+)>"),
        "</function>",
        "<parameter=",
        re.compile(r"\s*<parameter=(?P<name>[^>\s]+)>"),
        "</parameter>",
        has_line_breaks=True,
    ).parser(),
    "<tool_call>\n<function=tool>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>",
)
MINIMAX_M2 = ToolFormat(
    _Tags(
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        "<invoke name=",
        re.compile(r"[\"']?(?P<name>[^\s<>{}\"']+)[\"']?\s*>"),
        "</invoke>",
        "<parameter name=",
        re.compile(r"\s*<parameter name=[\"']?(?P<name>[^\s<>\"']+)[\"']?\s*>"),
        "</parameter>",
        has_line_breaks=False,
    ).parser(),
    '<minimax:tool_call>\n<invoke name="tool">\n<parameter name="argument">value</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
)
DEEPSEEK_V32 = ToolFormat(
    _Tags(
        (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
        f'<{_DSML}invoke name="',
        re.compile(r"(?P<name>[^\s<>{}\"]+)\"\s*>"),
        f"</{_DSML}invoke>",
        f"<{_DSML}parameter",
        re.compile(rf'\s*<{_DSML}parameter\s+name="(?P<name>[^"<>]+)"(?:\s+string="(?P<is_text>\w*)")?\s*>'),
        f"</{_DSML}parameter>",
        has_line_breaks=False,
    ).parser(),
    f'<{_DSML}function_calls>\n<{_DSML}invoke name="tool">\n<{_DSML}parameter name="argument" string="true">value'
    f"</{_DSML}parameter>\n</{_DSML}invoke>\n</{_DSML}function_calls>",
)
GLM45 = ToolFormat(
    between_marks("<tool_call>", "</tool_call>", _name_and_pairs, may_stay_open=True),
    "<tool_call>tool\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
)

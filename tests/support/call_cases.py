# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns with calls as models write them, right and wrong, by format: short texts on which parsers are compared."""

import json
from typing import Any

_TEXT = {"type": "string"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "now": {"type": "object", "properties": {}},
    "weather": {
        "type": "object",
        "properties": {"city": _TEXT, "state": _TEXT, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
    },
    "kinds": {
        "type": "object",
        "properties": {
            "whole": {"type": "integer"},
            "number": {"type": "number"},
            "flag": {"type": "boolean"},
            "text": _TEXT,
            "map": {"type": "object"},
            "list": {"type": "array", "items": _TEXT},
            "whole_or_null": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "text_or_null": {"anyOf": [_TEXT, {"type": "null"}]},
            "list_or_null": {"anyOf": [{"type": "array", "items": _TEXT}, {"type": "null"}]},
            "map_or_null": {"oneOf": [{"type": "object"}, {"type": "null"}]},
            "whole_or_text": {"anyOf": [{"type": "integer"}, _TEXT]},
            "list_or_text": {"anyOf": [{"type": "array", "items": _TEXT}, _TEXT]},
            "types": {"type": ["integer", "null"]},
            "text_types": {"type": ["string", "null"]},
            "choice": {"enum": [1, 2, 3]},
            "point": {"$ref": "#/$defs/Point"},
            "point_or_null": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
            "anything": {},
        },
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    },
}
_TYPED = {
    "whole": ("whole", "42"),
    "number": ("number", "3.14"),
    "whole number": ("number", "3.0"),
    "number with exponent": ("number", "1e3"),
    "a large whole": ("whole", "123456789012345678901"),
    "a float for a whole": ("whole", "42.0"),
    "a word for a whole": ("whole", "many"),
    "not a number": ("number", "NaN"),
    "infinity": ("number", "1e999"),
    "true": ("flag", "true"),
    "True": ("flag", "True"),
    "TRUE": ("flag", "TRUE"),
    "1 for true": ("flag", "1"),
    "map": ("map", '{"k": [1, null]}'),
    "map over lines": ("map", '{"k": 1,\n "l": 2}'),
    "list": ("list", '["a", "b"]'),
    "Python map": ("map", "{'k': True}"),
    "Python list": ("list", "['a', 'b']"),
    "text of digits": ("text", "007"),
    "text of a list": ("text", "[1]"),
    "text null": ("text", "null"),
    "text with tags": ("text", "if a<b: <x></y>"),
    "text with blanks": ("text", "  a  "),
    "text over lines": ("text", "def f():\n    return 1\n"),
    "no text": ("text", ""),
    "anyOf whole": ("whole_or_null", "5"),
    "anyOf null": ("whole_or_null", "null"),
    "anyOf None": ("whole_or_null", "None"),
    "anyOf text": ("text_or_null", "12"),
    "anyOf text null": ("text_or_null", "null"),
    "anyOf list": ("list_or_null", '["a", "b"]'),
    "oneOf map": ("map_or_null", '{"k": 1}'),
    "anyOf whole or text": ("whole_or_text", "12"),
    "anyOf whole or text, a word": ("whole_or_text", "many"),
    "anyOf list or text, digits": ("list_or_text", "5"),
    "anyOf list or text, list": ("list_or_text", '["a"]'),
    "types": ("types", "7"),
    "types with text, null": ("text_types", "null"),
    "enum without type": ("choice", "2"),
    "$ref": ("point", '{"x": 1}'),
    "anyOf $ref": ("point_or_null", '{"x": 1}'),
    "no schema": ("anything", "7"),
}


def _qwen(name: str, *values: tuple[str, str], opened: bool = True, closed: bool = True) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    call = f"<function={name}>\n{inside}</function>"
    return ("<tool_call>\n" if opened else "") + call + ("\n</tool_call>" if closed else "")


def _glm(name: str, *values: tuple[str, str], line: str = "\n") -> str:
    pairs = (f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in values)
    return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"


def _invoke(name: str, *values: tuple[str, str]) -> str:
    inside = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values)
    return f'<invoke name="{name}">\n{inside}</invoke>'


def _minimax(*invokes: str) -> str:
    return "<minimax:tool_call>\n" + "\n".join(invokes) + "\n</minimax:tool_call>"


_D = "\uff5cDSML\uff5c"


def _dsml_invoke(name: str, *values: tuple[str, str, str | None]) -> str:
    inside = ""
    for key, value, is_text in values:
        attribute = "" if is_text is None else f' string="{is_text}"'
        inside += f'<{_D}parameter name="{key}"{attribute}>{value}</{_D}parameter>\n'
    return f'<{_D}invoke name="{name}">\n{inside}</{_D}invoke>'


def _dsml(*invokes: str) -> str:
    return f"<{_D}function_calls>\n" + "\n".join(invokes) + f"\n</{_D}function_calls>"


def _kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def _kimi_call(key: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{key}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _hermes(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


_NOW = '{"name": "now", "arguments": {}}'
_CITY = '{"name": "weather", "arguments": {"city": "Oslo"}}'
_SECTION, _SECTION_END, _BEGIN, _SEPARATOR, _END = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)


def _deepseek_v3(name: str, arguments: str, kind: str = "function") -> str:
    return f"{_BEGIN}{kind}{_SEPARATOR}{name}\n```json\n{arguments}\n```{_END}"


def _deepseek_v31(name: str, arguments: str) -> str:
    return f"{_BEGIN}{name}{_SEPARATOR}{arguments}{_END}"


def _harmony(name: str, arguments: str, channel: str = "commentary") -> str:
    return f"<|channel|>{channel} to=functions.{name} <|constrain|>json<|message|>{arguments}"


_LLAMA = '{"name": "now", "parameters": {}}'

CASES: dict[str, dict[str, str]] = {
    "hermes": {
        "one": _hermes(_CITY),
        "text before": f"Sure.{_hermes(_CITY)}",
        "two": f"{_hermes(_CITY)}\n{_hermes(_NOW)}",
        "text behind": f"{_hermes(_NOW)} Done.",
        "not closed": f"<tool_call>\n{_NOW}",
        "not closed, text behind": f"<tool_call>\n{_NOW}\nDone.",
        "cut": '<tool_call>\n{"name": "now", "arguments": {"a": tr',
        "arguments in a text": _hermes('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}'),
        "arguments are a text": _hermes('{"name": "now", "arguments": "hello"}'),
        "arguments are null": _hermes('{"name": "now", "arguments": null}'),
        "no arguments": _hermes('{"name": "now"}'),
        "parameters": _hermes('{"name": "weather", "parameters": {"city": "Oslo"}}'),
        "single quotes": _hermes("{'name': 'now', 'arguments': {}}"),
        "trailing comma": _hermes('{"name": "now", "arguments": {},}'),
        "line break in a text": _hermes('{"name": "weather", "arguments": {"city": "a\nb"}}'),
        "not a number": _hermes('{"name": "now", "arguments": {"a": NaN}}'),
        "list in one mark": _hermes(f"[{_NOW}, {_NOW}]"),
        "two objects in one mark": _hermes(f"{_NOW}\n{_NOW}"),
        "fence": _hermes(f"```json\n{_NOW}\n```"),
        "in thinking": f"<think>{_hermes(_NOW)}</think>Done.",
        "in open thinking": f"<think>\n{_hermes(_NOW)}",
        "behind thinking": f"<think>Hm.</think>{_hermes(_NOW)}",
        "a bad one first": _hermes('{"name": bad}') + _hermes(_NOW),
        "mark in a text": _hermes('{"name": "weather", "arguments": {"city": "</tool_call>"}}'),
        "the first not closed": f"<tool_call>{_NOW}<tool_call>{_NOW}</tool_call>",
        "empty": "<tool_call></tool_call>",
        "name is a number": _hermes('{"name": 3, "arguments": {}}'),
        "brace too many": _hermes(f"{_NOW}}}"),
        "escapes": _hermes('{"name": "weather", "arguments": {"city": "\\u4e2d\\ud83d\\ude00"}}'),
        "prefix functions.": _hermes('{"name": "functions.now", "arguments": {}}'),
        "wrapper function": _hermes(f'{{"type": "function", "function": {_NOW}}}'),
        "mark in prose": "Write <tool_call> to call.",
        "no mark": _NOW,
    },
    "qwen3_coder": {
        "one": _qwen("weather", ("city", "Oslo"), ("state", "NO"), ("unit", "kelvin")),
        "text before": "Sure! " + _qwen("weather", ("city", "Oslo")),
        "two": _qwen("weather", ("city", "Oslo")) + "\n" + _qwen("weather", ("city", "Rome")),
        "no mark around": _qwen("weather", ("city", "Oslo"), opened=False, closed=False),
        "no opening mark": "I look. " + _qwen("weather", ("city", "Oslo"), opened=False),
        "no closing mark": _qwen("weather", ("city", "Oslo"), closed=False),
        "no end of the function": "<tool_call>\n<function=now>\n</tool_call>",
        "no end of function and call": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n",
        "no end of a parameter": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=state>\nNO\n"
        "</parameter>\n</function>\n</tool_call>",
        "no end of the last parameter": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</function>\n"
        "</tool_call>",
        "no end of the last parameter, another call": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n"
        "</function>\n</tool_call>\n" + _qwen("weather", ("city", "Rome")),
        "cut in a value": "<tool_call>\n<function=weather>\n<parameter=city>\nOs",
        "cut in a name": "<tool_call>\n<function=weather>\n<parameter=ci",
        "no parameters": _qwen("now"),
        "unknown parameter": _qwen("weather", ("zip", "0150")),
        "unknown function": _qwen("nope", ("a", "1")),
        "two functions in one mark": "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n"
        "</tool_call>",
        "in one line": "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>",
        "the same parameter twice": _qwen("weather", ("city", "Oslo"), ("city", "Rome")),
        "value of </function>": _qwen("kinds", ("text", "</function>")),
        "value of </tool_call>": _qwen("kinds", ("text", "</tool_call>")),
        "value with a parameter": _qwen("kinds", ("text", "a <parameter=b> c")),
        "text between parameters": _qwen("weather", ("city", "Oslo")).replace("</function>", "so\n</function>"),
        "text behind the function": _qwen("now").replace("</tool_call>", "so\n</tool_call>"),
        "JSON in the mark": f"<tool_call>{_NOW}</tool_call>",
        "in thinking": f"<think>{_qwen('now')}</think>Done.",
        **{name: _qwen("kinds", pair) for name, pair in _TYPED.items()},
    },
    "glm45": {
        "one": _glm("weather", ("city", "Oslo"), ("state", "NO")),
        "GLM-4.7's form": _glm("weather", ("city", "Oslo"), ("state", "NO"), line=""),
        "GLM-4.7's form, no arguments": "<tool_call>now</tool_call>",
        "no arguments": "<tool_call>now\n</tool_call>",
        "indented": "<tool_call>weather\n    <arg_key>city</arg_key>\n    <arg_value>Oslo</arg_value>\n  </tool_call>",
        "two": _glm("weather", ("city", "Oslo")) + "\n\nthen\n\n" + _glm("weather", ("city", "Rome")),
        "behind thinking": "<think>Hm.</think>\n" + _glm("weather", ("city", "Oslo")),
        "in thinking": f"<think>{_glm('now')}</think>Done.",
        "no end of a key": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>state\n"
        "<arg_value>NO</arg_value>\n</tool_call>",
        "no closing mark": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>",
        "no end of a value": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n<arg_key>state</arg_key>\n"
        "<arg_value>NO</arg_value>\n</tool_call>",
        "no end of the last value": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n</tool_call>",
        "key alone": "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>",
        "value in lines of its own": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\nOslo\n</arg_value>\n"
        "</tool_call>",
        "unknown parameter": _glm("weather", ("zip", "0150")),
        "unknown function": _glm("nope", ("a", "1")),
        "JSON in the mark": f"<tool_call>{_NOW}</tool_call>",
        "name between blanks": "<tool_call> weather \n<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        "empty": "<tool_call></tool_call>",
        "the same parameter twice": _glm("weather", ("city", "Oslo"), ("city", "Rome")),
        "mark in a value": _glm("kinds", ("text", "</tool_call>")),
        "escaped line break": _glm("kinds", ("text", "a\\nb")),
        **{name: _glm("kinds", pair) for name, pair in _TYPED.items()},
    },
    "minimax_m2": {
        "one": _minimax(_invoke("weather", ("city", "Oslo"), ("state", "NO"))),
        "text before": "Sure. " + _minimax(_invoke("weather", ("city", "Oslo"))),
        "two": _minimax(_invoke("weather", ("city", "Oslo")), _invoke("now")),
        "two marks": _minimax(_invoke("now")) + "\n" + _minimax(_invoke("now")),
        "in one line": '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo</parameter></invoke>'
        "</minimax:tool_call>",
        "no mark around": _invoke("weather", ("city", "Oslo")),
        "no closing mark": _minimax(_invoke("weather", ("city", "Oslo"))).removesuffix("\n</minimax:tool_call>"),
        "no end of the invoke": '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo</parameter>'
        "</minimax:tool_call>",
        "no end of a parameter": '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo'
        '<parameter name="state">NO</parameter></invoke></minimax:tool_call>',
        "no end of the last parameter": '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo'
        "</invoke></minimax:tool_call>",
        "cut in a value": '<minimax:tool_call><invoke name="weather"><parameter name="city">Os',
        "single quotes": "<minimax:tool_call><invoke name='weather'><parameter name='city'>Oslo</parameter></invoke>"
        "</minimax:tool_call>",
        "no quotes": "<minimax:tool_call><invoke name=weather><parameter name=city>Oslo</parameter></invoke>"
        "</minimax:tool_call>",
        "unknown function": _minimax(_invoke("nope", ("a", "1"))),
        "unknown parameter": _minimax(_invoke("weather", ("zip", "0150"))),
        "value of </invoke>": _minimax(_invoke("kinds", ("text", "</invoke>"))),
        "empty": "<minimax:tool_call></minimax:tool_call>",
        "in thinking": f"<think>{_minimax(_invoke('now'))}</think>Done.",
        **{name: _minimax(_invoke("kinds", pair)) for name, pair in _TYPED.items()},
    },
    "deepseek_v32": {
        "one": _dsml(_dsml_invoke("weather", ("city", "Oslo", "true"), ("state", "NO", "true"))),
        "text before": "I look.\n\n" + _dsml(_dsml_invoke("weather", ("city", "Oslo", "true"))),
        "two": _dsml(_dsml_invoke("weather", ("city", "Oslo", "true")), _dsml_invoke("now")),
        "no mark around": _dsml_invoke("weather", ("city", "Oslo", "true")),
        "no closing mark": _dsml(_dsml_invoke("now")).removesuffix(f"\n</{_D}function_calls>"),
        "no end of the invoke": f'<{_D}function_calls><{_D}invoke name="weather"><{_D}parameter name="city"'
        f' string="true">Oslo</{_D}parameter></{_D}function_calls>',
        "no end of a parameter": f'<{_D}function_calls><{_D}invoke name="weather"><{_D}parameter name="city"'
        f' string="true">Oslo<{_D}parameter name="state" string="true">NO</{_D}parameter></{_D}invoke>'
        f"</{_D}function_calls>",
        "no end of the last parameter": f'<{_D}function_calls><{_D}invoke name="weather"><{_D}parameter name="city"'
        f' string="true">Oslo</{_D}invoke></{_D}function_calls>',
        "cut in a value": f'<{_D}function_calls><{_D}invoke name="weather"><{_D}parameter name="city" string="true">Os',
        "JSON": _dsml(f'<{_D}invoke name="weather">\n{{"city": "Oslo"}}\n</{_D}invoke>'),
        "unknown function": _dsml(_dsml_invoke("nope", ("a", "1", "false"))),
        "unknown parameter": _dsml(_dsml_invoke("weather", ("zip", "0150", "true"))),
        "unknown parameter, JSON": _dsml(_dsml_invoke("weather", ("zip", "150", "false"))),
        "no attribute": _dsml(_dsml_invoke("kinds", ("whole", "5", None))),
        "text said, whole meant": _dsml(_dsml_invoke("kinds", ("whole", "5", "true"))),
        "JSON said, text meant": _dsml(_dsml_invoke("kinds", ("text", "5", "false"))),
        "JSON said, a word": _dsml(_dsml_invoke("kinds", ("map", "many", "false"))),
        "null": _dsml(_dsml_invoke("kinds", ("whole_or_null", "null", "false"))),
        "map": _dsml(_dsml_invoke("kinds", ("map", '{"k": [1, null]}', "false"))),
        "$ref": _dsml(_dsml_invoke("kinds", ("point", '{"x": 1}', "false"))),
        "not a number": _dsml(_dsml_invoke("kinds", ("number", "NaN", "false"))),
        "text with blanks": _dsml(_dsml_invoke("kinds", ("text", "  a  ", "true"))),
        "wrapped arguments": _dsml(_dsml_invoke("weather", ("arguments", '{"city": "Oslo"}', "false"))),
        "in thinking": f"<think>{_dsml(_dsml_invoke('now'))}</think>Done.",
    },
    "kimi_k2": {
        "one": _kimi(_kimi_call("functions.weather:0", '{"city": "Oslo"}')),
        "blank behind the key": _kimi(_kimi_call("functions.weather:0 ", '{"city": "Oslo"}')),
        "text before": "I look. " + _kimi(_kimi_call("functions.weather:0", '{"city": "Oslo"}')),
        "two": _kimi(_kimi_call("functions.weather:0", '{"city": "Oslo"}'), _kimi_call("functions.now:1", "{}")),
        "no prefix": _kimi(_kimi_call("weather:0", '{"city": "Oslo"}')),
        "no number": _kimi(_kimi_call("functions.weather", '{"city": "Oslo"}')),
        "number alone": _kimi(_kimi_call("0", '{"city": "Oslo"}')),
        "tags in a text": _kimi(_kimi_call("functions.kinds:0", '{"text": "<div>a</div>"}')),
        "JSON over lines": _kimi(_kimi_call("functions.weather:0", '{\n  "city": "Oslo"\n}')),
        "a bad one first": _kimi(_kimi_call("functions.now:0", '{"a": '), _kimi_call("functions.now:1", "{}")),
        "empty arguments": _kimi(_kimi_call("functions.now:0", "")),
        "no section": _kimi_call("functions.now:0", "{}"),
        "no end of the section": f"<|tool_calls_section_begin|>{_kimi_call('functions.now:0', '{}')}",
        "no end of the call": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}",
        "text behind": _kimi(_kimi_call("functions.now:0", "{}")) + " Done.",
        "whole in a text": _kimi(_kimi_call("functions.kinds:0", '{"whole": "5"}')),
        "number for a text": _kimi(_kimi_call("functions.kinds:0", '{"text": 5}')),
        "not a number": _kimi(_kimi_call("functions.kinds:0", '{"number": NaN}')),
        "unknown function": _kimi(_kimi_call("functions.nope:0", '{"a": 1}')),
        "name with a dot": _kimi(_kimi_call("functions.now.x:0", "{}")),
        "in thinking": f"<think>{_kimi(_kimi_call('functions.now:0', '{}'))}</think>Done.",
    },
    "deepseek_v3": {
        "one": _SECTION + _deepseek_v3("weather", '{"city": "Oslo"}') + _SECTION_END,
        "two": _SECTION + _deepseek_v3("weather", '{"city": "Oslo"}') + "\n" + _deepseek_v3("now", "{}") + _SECTION_END,
        "no end of the section": _SECTION + _deepseek_v3("now", "{}"),
        "no section": _deepseek_v3("now", "{}"),
        "bad JSON": _SECTION + _deepseek_v3("now", "{a}") + _SECTION_END,
        "no fence": f"{_SECTION}{_BEGIN}function{_SEPARATOR}now\n{{}}{_END}{_SECTION_END}",
        "fence in a line": f"{_SECTION}{_BEGIN}function{_SEPARATOR}now\n```json{{}}```{_END}{_SECTION_END}",
        "text before": "I look.\n" + _SECTION + _deepseek_v3("now", "{}") + _SECTION_END,
        "empty arguments": _SECTION + _deepseek_v3("now", "") + _SECTION_END,
        "arguments in a text": _SECTION + _deepseek_v3("now", '"{}"') + _SECTION_END,
        "cut": f"{_SECTION}{_BEGIN}function{_SEPARATOR}now\n```json\n{{",
        "line break in a text": _SECTION + _deepseek_v3("weather", '{"city": "a\nb"}') + _SECTION_END,
        "in thinking": f"<think>{_SECTION}{_deepseek_v3('now', '{}')}{_SECTION_END}</think>Done.",
        "V3.1's form": _SECTION + _deepseek_v31("now", "{}") + _SECTION_END,
        "another kind": _SECTION + _deepseek_v3("now", "{}", "tool") + _SECTION_END,
    },
    "deepseek_v31": {
        "one": _SECTION + _deepseek_v31("weather", '{"city": "Oslo"}') + _SECTION_END,
        "two": _SECTION + _deepseek_v31("weather", '{"city": "Oslo"}') + _deepseek_v31("now", "{}") + _SECTION_END,
        "no end of the section": _SECTION + _deepseek_v31("now", "{}"),
        "no section": _deepseek_v31("now", "{}"),
        "bad JSON": _SECTION + _deepseek_v31("now", "{a}") + _SECTION_END,
        "fence": _SECTION + _deepseek_v31("now", "```json\n{}\n```") + _SECTION_END,
        "text before": "I look." + _SECTION + _deepseek_v31("now", "{}") + _SECTION_END,
        "empty arguments": _SECTION + _deepseek_v31("now", "") + _SECTION_END,
        "cut": f"{_SECTION}{_BEGIN}now{_SEPARATOR}{{",
        "nested": _SECTION + _deepseek_v31("kinds", '{"map": {"a": [1, {"b": null}]}}') + _SECTION_END,
        "between blanks": f"{_SECTION}{_BEGIN} now {_SEPARATOR} {{}} {_END}{_SECTION_END}",
        "no end of the call": f"{_SECTION}{_BEGIN}now{_SEPARATOR}{{}}{_SECTION_END}",
        "prefix functions.": _SECTION + _deepseek_v31("functions.now", "{}") + _SECTION_END,
    },
    "mistral_args": {
        "one": '[TOOL_CALLS]now[ARGS]{"a": 1}',
        "no [ARGS]": '[TOOL_CALLS]now{"a": 3.5, "b": 4}',
        "no [ARGS], two": '[TOOL_CALLS]now{"a": 3.5}[TOOL_CALLS]now{"a": 3}',
        "two": '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{"a": 2}',
        "with an id": '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        "text before": "Sure.[TOOL_CALLS]now[ARGS]{}",
        "text behind": "[TOOL_CALLS]now[ARGS]{} Done.",
        "cut": '[TOOL_CALLS]now[ARGS]{"a": ',
        "list": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        "nested": '[TOOL_CALLS]kinds[ARGS]{"map": {"a": [1]}}',
        "between blanks": '[TOOL_CALLS] now [ARGS] {"a": 1}',
        "empty arguments": "[TOOL_CALLS]now[ARGS]",
    },
    "llama3_json": {
        "one": '{"name": "now", "parameters": {"a": 1}}',
        "arguments": '{"name": "now", "arguments": {"a": 1}}',
        "two": f"{_LLAMA}; {_LLAMA}",
        "two, one a line": f"{_LLAMA}\n{_LLAMA}",
        "Python tag": f"<|python_tag|>{_LLAMA}",
        "text before": f"Here: {_LLAMA}",
        "text behind": f"{_LLAMA} Done.",
        "list": f"[{_LLAMA}]",
        "fence": f"```json\n{_LLAMA}\n```",
        "an answer": '{"answer": 1}',
        "an answer with a name": '{"name": "Bob", "age": 3}',
        "name alone": '{"name": "now"}',
        "type": '{"type": "function", "name": "now", "parameters": {}}',
        "arguments in a text": '{"name": "now", "parameters": "{}"}',
        "cut": '{"name": "now", "parameters": {',
        "nested": '{"name": "kinds", "parameters": {"map": {"name": "x", "parameters": {}}}}',
        "braces before": f"The set {{a}}. {_LLAMA}",
    },
    "harmony": {
        "one": _harmony("now", '{"a": 1}'),
        "behind analysis": f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{_harmony('now', '{}')}",
        "recipient before the channel": "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        "no constraint": "<|channel|>commentary to=functions.now<|message|>{}",
        "in the analysis channel": _harmony("now", "{}", "analysis"),
        "bad JSON": _harmony("now", "{a}"),
        "cut": _harmony("now", '{"a": '),
        "an answer": "<|channel|>final<|message|>42",
        "another recipient": "<|channel|>commentary to=now <|constrain|>json<|message|>{}",
        "two": f"{_harmony('now', '{}')}<|call|><|start|>assistant{_harmony('now', json.dumps({'a': 2}))}",
        "empty arguments": _harmony("now", ""),
        "talk of a call": "<|channel|>analysis<|message|>I call to=functions.now {}<|end|><|start|>assistant"
        "<|channel|>final<|message|>Done.",
    },
    "olmo3": {
        "one": '<function_calls>\nweather(city="Oslo")\n</function_calls>',
        "two": '<function_calls>\nweather(city="Oslo")\nnow()\n</function_calls>',
        "no closing mark": "<function_calls>\nnow()",
        "argument without a name": '<function_calls>weather("Oslo")</function_calls>',
        "nested": '<function_calls>kinds(map={"a": [1, None]}, flag=True)</function_calls>',
        "words of JSON": "<function_calls>kinds(flag=true, whole_or_null=null)</function_calls>",
        "escapes": '<function_calls>weather(city="a\\"b, c(d")</function_calls>',
        "code": "<function_calls>now(a=__import__('os'))</function_calls>",
        "list": "<function_calls>[weather(city='Oslo'), now()]</function_calls>",
        "negative": "<function_calls>kinds(whole=-3)</function_calls>",
    },
}
CASES["mistral"] = {
    "one": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "no blank": '[TOOL_CALLS][{"name": "now", "arguments": {"a": 3.5}}]',
    "arguments first": '[TOOL_CALLS] [{"arguments": {"name": "Ann"}, "name": "now"}]',
    "two": f"[TOOL_CALLS] [{_NOW}, {_NOW}]",
    "text before": f"Sure.[TOOL_CALLS] [{_NOW}]",
    "text behind": f"[TOOL_CALLS] [{_NOW}]\nDone.",
    "two marks": f"[TOOL_CALLS] [{_NOW}][TOOL_CALLS] [{_NOW}]",
    "text in between": f"[TOOL_CALLS]  so [{_NOW}]",
    "no JSON": "[TOOL_CALLS] so it is",
    "object": f"[TOOL_CALLS] {_NOW}",
    "with an id": '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
    "cut": '[TOOL_CALLS][{"name": "now", "argum',
}

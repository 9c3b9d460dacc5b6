# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values in tags: their types by the schema of a tool, whatever that is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.tools.formats.interface import ToolCall
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from nemo_rl_moe.tools.formats.typed_values import kinds_of, properties_of, typed_value
from tests.support.quick_list import examples

WRITTEN = {
    "qwen3_coder": "<tool_call><function=f><parameter=a>\n{}\n</parameter></function></tool_call>",
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>",
    "minimax_m2": '<invoke name="f"><parameter name="a">{}</parameter></invoke>',
}
NULL, WHOLE, TEXT = {"type": "null"}, {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [WHOLE, NULL]}, "5", 5),
        ({"anyOf": [WHOLE, NULL]}, "null", None),
        ({"oneOf": [{"type": "array"}, NULL]}, '["a"]', ["a"]),
        ({"anyOf": [TEXT, NULL]}, "12", "12"),
        ({"anyOf": [TEXT, NULL]}, "null", None),
        ({"anyOf": [WHOLE, TEXT]}, "12", 12),
        ({"anyOf": [WHOLE, TEXT]}, "many", "many"),
        ({"anyOf": [{"type": "array"}, TEXT]}, "5", "5"),
        ({"anyOf": [{}, NULL]}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/Place"}]}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Place"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Level"}, "2", 2),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, NULL]}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"$ref": "#/$defs/Nothing"}, "5", "5"),
        ({"$ref": "other.json#/x"}, "5", "5"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"nullable": True}, "7", "7"),
        ({}, "7", "7"),
        (True, "7", "7"),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "0", False),
        ({"type": "number"}, "3.0", 3),
        ({"type": "number"}, "123456789012345678901", 123456789012345678901),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "object"}, "{'a': True}", "{'a': True}"),
        ({"type": "array"}, "[1, NaN]", "[1, NaN]"),
    ],
)
def test_the_schema_says_what_a_text_means(name: str, schema: object, text: str, value: object) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {
            "Place": {"type": "object", "properties": {"x": WHOLE}},
            "Level": {"enum": [1, 2]},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, WHOLE]},
        },
    }
    (call,) = TOOL_FORMATS[name].calls(WRITTEN[name].replace("{}", text, 1), {"f": properties_of(parameters)})
    assert isinstance(call, ToolCall)
    assert json.dumps(dict(call.arguments)) == json.dumps({"a": value})


WORDS = st.sampled_from(
    ["type", "enum", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "nullable", "properties", "a"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(200), deadline=None)
@given(parameters=JSON, text=st.sampled_from(["5", "null", "[1]", "9" * 5000, "a", ""]))
def test_no_schema_is_an_error(parameters: object, text: str) -> None:
    for schema in properties_of(parameters).values():
        json.dumps(typed_value(text, kinds_of(schema)), allow_nan=False)

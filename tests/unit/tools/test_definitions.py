# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools from typed functions: their definitions, and the check of what a model gives."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.config.tool_definitions import definition_problem
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.tools import ready
from nemo_rl_moe.tools.arguments import ArgumentError, checked_arguments, kind_in_words
from nemo_rl_moe.tools.definitions import Tool, load_tools
from tests.support import tool_types

HERE = "tests.support.tool_functions"
TYPES = "tests.support.tool_types"
SETTINGS = {"look_up": {"dictionary": "words.txt"}}
TOOLS = load_tools([f"{HERE}:add", f"{HERE}:look_up"], SETTINGS)


def checked(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    return checked_arguments(arguments, tool.parameters, tool.usage)


def test_types_and_docstring_make_the_definition() -> None:
    assert TOOLS["look_up"].definition == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "What to look for, in any case."},
                    "language": {"type": "string", "enum": ["en", "fr"], "description": "Of the word."},
                    "places": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "nullable": True,
                        "description": "Where to look.",
                    },
                    "options": {
                        "type": "object",
                        "additionalProperties": {"type": "number"},
                        "nullable": True,
                        "description": "Weights.",
                    },
                },
                "required": ["word"],
            },
        },
    }
    assert TOOLS["look_up"].usage == (
        'look_up(word: string, language: "en" or "fr" = "en", places: array of integer or null = null,'
        " options: object or null = null)"
    )
    assert TOOLS["look_up"].settings == {"dictionary": "words.txt"}
    assert all(definition_problem(tool.definition) is None for tool in TOOLS.values())
    json.dumps([tool.definition for tool in TOOLS.values()])


def test_pydantic_makes_the_schemas_of_classes() -> None:
    """Without references, as chat templates show each parameter alone."""
    tool = load_tools([f"{TYPES}:order"], {})["order"]
    address = {
        "type": "object",
        "properties": {"street": {"type": "string"}, "title": {"type": "string", "default": "Dr"}},
        "required": ["street"],
    }
    assert tool.definition["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "description": "A position of an order.",
                    "properties": {
                        "name": {"type": "string", "description": "In English."},
                        "count": {"type": "integer", "default": 1, "exclusiveMinimum": 0},
                    },
                    "required": ["name"],
                },
                "description": "The positions.",
            },
            "address": {"anyOf": [address, {"type": "null"}], "description": "Where to send it."},
            "speed": {"type": "string", "enum": ["slow", "fast"], "description": "Of the delivery."},
            "options": {
                "type": "object",
                "properties": {"gift": {"type": "boolean"}},
                "required": ["gift"],
                "description": "More.",
            },
            "days": {"type": "integer", "minimum": 0, "description": "Latest day, with two lines."},
        },
        "required": ["items"],
    }
    assert tool.definition["function"]["description"] == "Order things."
    assert tool.usage.endswith(
        'speed: "slow" or "fast" = "slow", options: object = {"gift": false}, days: integer = 3)'
    )


def test_code_of_the_user_checks_arguments_in_the_process_of_the_tool_alone() -> None:
    tool = load_tools([f"{TYPES}:order"], {})["order"]
    given = {"items": [{"name": "tea", "count": "2"}], "address": {"street": "x"}, "speed": "fast", "days": "1"}
    assert checked(tool, given) == given
    taken = checked_arguments(given, tool.parameters, tool.usage, with_user_code=True)
    assert taken == {
        "items": [tool_types.Item(name="tea", count=2)],
        "address": tool_types.Address("x"),
        "speed": tool_types.Speed.FAST,
        "days": 1,
    }
    for wrong, message in (
        ({"items": [{"name": "tea", "count": 0}]}, "0.count: Input should be greater than 0; expected order("),
        (
            {"items": [{"name": "boom"}]},
            'the argument items is [{"name": "boom"}]: ZeroDivisionError: division by zero',
        ),
        ({"items": [], "speed": "brisk"}, "the argument speed is \"brisk\": Input should be 'slow' or 'fast'"),
        ({"item": []}, "there is no argument 'item'; did you mean items?"),
    ):
        with pytest.raises(ArgumentError) as caught:
            checked_arguments(wrong, tool.parameters, tool.usage, with_user_code=True)
        assert message in str(caught.value)


def test_methods_of_a_class_share_the_object_of_a_trajectory() -> None:
    tools = load_tools(
        [f"{TYPES}:Counter.count", f"{TYPES}:Counter.total", f"{TYPES}:Counter.zero"], {"Counter": {"first": 2}}
    )
    assert tools["count"].usage == "count(by: integer = 1)"
    state = tools["count"].state
    assert state is not None
    assert tools["total"].state is state
    assert tools["zero"].state is None
    counter = state.make({"start": 3})
    assert tools["total"].function(counter) == 5
    with pytest.raises(ConfigurationError, match=r"^env\.driver\.parameters\.Counter\.first: got 'x' \(str\)"):
        load_tools([f"{TYPES}:Counter.count"], {"Counter": {"first": "x"}})
    with pytest.raises(ConfigurationError, match=r"other\.Counter.*another class has the name"):
        load_tools([f"{TYPES}:Counter.count", f"{TYPES}:other.Counter.reset"], {})


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("calculater", "got 'calculater', expected package.module:function, or one of calculator, python, search"),
        ("no_such_module:f", "there is no module no_such_module"),
        (f"{HERE}:ad", f"{HERE} has no ad"),
        (f"{HERE}:NUMBER", f"{HERE}:NUMBER is 3 (int), expected a function (def or async def) that returns its result"),
        (f"{HERE}:counts_up", "expected a function (def or async def) that returns its result"),
        (f"{TYPES}:Counter", "expected a function (def or async def) that returns its result, or a method of a class"),
        (f"{TYPES}:Counter.named", "(method), expected a function (def or async def)"),
        (f"{TYPES}:NeedsMore.count", "count: NeedsMore needs record, place, expected at most record (the prompt's"),
        (f"{HERE}:nameless", "is named <lambda>, expected a function (def) with a name"),
        (f"{HERE}:without_docstring", "without_docstring because it has no docstring"),
        (f"{HERE}:without_type", "Argument a is missing a type hint in function without_type; expected a docstring"),
        (f"{HERE}:without_description", "no description for the argument 'a'"),
        (f"{HERE}:with_class", "with_class: a is of type list[subprocess.Popen] | None, which has no JSON schema: "),
        (f"{TYPES}:grow", "grow: tree is of type tests.support.tool_types.Tree, which has no JSON schema: it contains"),
        (f"{HERE}:with_unknown_type", "its types cannot be read: NameError: name 'Missing' is not defined"),
        (
            f"{HERE}:with_rest",
            "*a: int cannot be passed by name; expected no *args, **kwargs or positional-only parameters",
        ),
        (f"{HERE}:add", f"got '{HERE}:add', but another tool has the name add; expected different names"),
    ],
)
def test_a_function_that_cannot_be_told_to_a_model_is_refused_in_one_line(reference: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_tools([f"{HERE}:add", reference], {})
    text = str(caught.value)
    assert text.startswith("env.driver.tools: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, ".look_up.dictionary: is missing, and look_up has no default for it"),
        ({"dictionary": "x", "limits": 3}, ".look_up: got 'limits', expected dictionary or limit; did you mean limit?"),
        ({"dictionary": "x", "word": "y"}, ".look_up: got 'word', expected dictionary or limit"),
        ({"dictionary": 3}, ".look_up.dictionary: got 3 (int): Input should be a valid string"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_tools([f"{HERE}:look_up"], {"look_up": settings})
    assert f"env.driver.parameters{message}" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"^env\.driver\.parameters: got 'lookup', expected a tool"):
        load_tools([f"{HERE}:look_up"], {**SETTINGS, "lookup": {}})


def test_a_ready_tool_that_this_machine_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ready.ReadyTool(ready.READY_TOOLS["calculator"].function, lambda _: "no namespaces")
    monkeypatch.setitem(ready.READY_TOOLS, "calculator", broken)
    with pytest.raises(ConfigurationError, match="cannot run on this machine: no namespaces"):
        load_tools(["calculator"], {})


def test_arguments_are_converted_where_nothing_is_lost() -> None:
    assert checked(TOOLS["add"], {"a": "3"}) == {"a": 3}
    assert checked(TOOLS["add"], {"b": 2.0, "a": 1}) == {"a": 1, "b": 2}
    given = {"word": "x", "language": "fr", "places": None, "options": {"a": 1}}
    assert checked(TOOLS["look_up"], given) == given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "the argument a is missing; expected add(a: integer, b: integer = 1)"),
        ({"a": 1, "bb": 2}, "there is no argument 'bb'"),
        ({"a": "one"}, 'the argument a is "one", expected integer; expected add('),
        ({"a": 1.5}, "the argument a is 1.5, expected integer"),
        ({"a": None}, "the argument a is null, expected integer"),
        ({"a": "x" * 1000}, "(1,002 characters)"),
        ({"x" * 1000: 1}, "(1,000 characters)"),
    ],
)
def test_a_wrong_call_says_how_to_call(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        checked(TOOLS["add"], arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_run_sets_is_hidden_from_the_model() -> None:
    with pytest.raises(ArgumentError, match="there is no argument 'dictionary'"):
        checked(TOOLS["look_up"], {"word": "x", "dictionary": "/etc/passwd"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "word", "places", "options", "language"]) | st.text(), JSON))
def test_whatever_a_model_gives_is_taken_or_explained(arguments: dict[str, Any]) -> None:
    for tool in TOOLS.values():
        with suppress(ArgumentError):
            taken = checked(tool, arguments)
            assert set(taken) == set(arguments)
            assert {"a", "word"} & set(taken)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (True, "any value"),
        ({"enum": 5}, "any value"),
        ({"anyOf": 5}, "any value"),
        ({"anyOf": ["x", {"type": "integer"}]}, "any value or integer"),
        ({"type": "array", "items": "x"}, "array of any value"),
        ({"type": ["integer", 3]}, "integer or 3"),
    ],
)
def test_schemas_of_strangers_have_words_whatever_they_hold(schema: object, words: str) -> None:
    assert kind_in_words(schema) == words

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Each way in which a record can be wrong has its own exact reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.data.messages import SPEAKERS
from nemo_rl_moe.data.records import Example, RecordError, parse_record

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
NAMED = "to use other keys, set data.messages_key, or data.prompt_key and data.completion_key"
ROLES = "system, developer, user, assistant, tool"


def test_messages_are_taken_as_they_are():
    example = parse_record({"messages": [USER, {**ASSISTANT, "reasoning_content": "r"}], "id": 7}, "f:1")
    assert example == Example("f:1", (USER, {**ASSISTANT, "reasoning_content": "r"}), 0, None)


def test_strings_become_a_user_and_an_assistant_turn_and_are_kept():
    example = parse_record({"prompt": "hi", "completion": "hello"}, "f:1")
    assert example == Example("f:1", (USER, ASSISTANT), 1, ("hi", "hello"))


def test_only_the_completion_of_message_lists_is_trained_on():
    example = parse_record({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}, "f:1")
    assert example == Example("f:1", (USER, ASSISTANT, USER, ASSISTANT), 3, None)


def test_a_string_and_a_list_mix():
    assert parse_record({"prompt": "hi", "completion": [ASSISTANT]}, "f:1").messages == (USER, ASSISTANT)
    assert parse_record({"prompt": [USER], "completion": "hello"}, "f:1").plain is None


def test_messages_win_beside_a_prompt():
    assert parse_record({"prompt": "x", "messages": [USER, ASSISTANT]}, "f:1").messages == (USER, ASSISTANT)


@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_two_forms_in_a_line_are_an_error(form):
    record = {form: [USER, ASSISTANT], "completion": "y"}
    for line, other in (({**record, "prompt": "x"}, "prompt and completion"), (record, "completion")):
        with pytest.raises(RecordError) as error:
            parse_record(line, "f:1")
        assert str(error.value) == f"the line has both {form} and {other}, expected one of the two"
    assert parse_record({**record, "completion": None}, "f:1").messages == (USER, ASSISTANT)


def test_conversations_of_sharegpt():
    call = {"name": "add", "arguments": '{"a": 1}'}
    said = [("human", "q"), ("function_call", json.dumps(call)), ("observation", "2"), ("gpt", "a")]
    record = {"system": "s", "conversations": [{"from": who, "value": what, "weight": None} for who, what in said]}
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    expected = (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "a"},
    )
    assert parse_record(record, "f:1") == Example("f:1", expected)
    two = [
        {**turn, "value": [call, call]} if turn["from"] == "function_call" else turn for turn in record["conversations"]
    ]
    own = [{"from": "system", "value": [{"type": "text", "text": "t"}]}, *two]
    found = parse_record({**record, "conversations": own}, "f:1").messages
    assert found[0] == {"role": "system", "content": "t"}
    assert found[2]["tool_calls"] == [called, called]
    system = {"role": "system", "content": "s"}
    assert parse_record({**record, "messages": [USER, ASSISTANT]}, "f:1").messages == (system, USER, ASSISTANT)


def test_messages_of_sharegpt_wherever_messages_stand():
    human, gpt = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
    assert parse_record({"prompt": [human], "completion": [gpt]}, "f:1").messages == (USER, ASSISTANT)


def test_nulls_that_a_table_fills_in_are_absent():
    record = {"messages": [{**USER, "name": None}, ASSISTANT], "prompt": None, "completion": None}
    assert parse_record(record, "f:1").messages == (USER, ASSISTANT)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "the line is a list, expected an object with messages, or prompt and completion"),
        ("x", "the line is a string, expected an object with messages, or prompt and completion"),
        (None, "the line is null, expected an object with messages, or prompt and completion"),
        ({}, f"the line has neither messages nor prompt and completion; its keys: none; {NAMED}"),
        (
            {"text": "a", "id": 1},
            f"the line has neither messages nor prompt and completion; its keys: text, id; {NAMED}",
        ),
        (
            {"prompt": "a"},
            "the line has prompt but no completion; its keys: prompt; to use another key, set data.completion_key",
        ),
        (
            {"completion": "a", "prompt": None},
            "the line has completion but no prompt; its keys: completion, prompt; to use another key, set"
            " data.prompt_key",
        ),
        ({"prompt": "", "completion": "b"}, "prompt is empty"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": []}, "completion is empty"),
        ({"prompt": 3, "completion": "b"}, "prompt is a number, expected a string or a list of messages"),
        ({"prompt": "a", "completion": True}, "completion is a boolean, expected a string or a list of messages"),
        ({"prompt": "a", "completion": {}}, "completion is an object, expected a string or a list of messages"),
        ({"prompt": "a", "completion": [USER]}, "completion has no assistant turn: there is nothing to train on"),
        ({"messages": "a"}, "messages is a string, expected a list of objects with role and content"),
        ({"messages": USER}, "messages is an object, expected a list of objects with role and content"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [USER]}, "messages has no assistant turn: there is nothing to train on"),
        ({"messages": [USER, "b"]}, "messages[1] is a string, expected an object with role and content"),
        ({"messages": [{"content": "a"}]}, "messages[0] has no role"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content is null, expected a string, or a list of parts of type text or image",
        ),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role is a number, expected a string"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content is a number, expected a string, or a list of parts of type text or image",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "messages[0].content[0] is a string, expected an object with type and text",
        ),
        (
            {"messages": [USER, {"role": "assisstant", "content": "a"}]},
            f"messages[1].role is 'assisstant', expected {ROLES}; did you mean assistant?",
        ),
        (
            {"conversations": [{"from": "humann", "value": "a"}]},
            f"conversations[0].from is 'humann', expected {', '.join(SPEAKERS)}; did you mean human?",
        ),
        ({"conversations": [{"from": 3, "value": "a"}]}, "conversations[0].from is a number, expected a string"),
        ({"conversations": [{"value": "a"}]}, "conversations[0] has no role"),
        ({"conversations": [{"from": "human"}]}, "conversations[0] has no value"),
        (
            {"conversations": [{"from": "gpt", "value": None}]},
            "conversations[0].value is null, expected a string, or a list of parts of type text or image, "
            "and no tool_calls",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]},
            "conversations[1].value is empty: an assistant turn needs text or tool_calls to train on",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add(1)"}]},
            "conversations[0].value is a string that is not valid JSON: Expecting value at character 1",
        ),
        (
            {"conversations": [{"from": "function_call", "value": 3}]},
            "conversations[0].tool_calls[0] has no function, expected an object with name and arguments",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}]},
            "conversations has no assistant turn: there is nothing to train on",
        ),
        ({"messages": [{"role": "gpt", "content": "a"}]}, f"messages[0].role is 'gpt', expected {ROLES}"),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "messages[1].content is empty: an assistant turn needs text or tool_calls to train on",
        ),
        (
            {"messages": [{"role": "user", "content": "a\ud83d"}, ASSISTANT]},
            "messages[0].content holds \\ud83d alone, half of a surrogate pair, which is no character",
        ),
        (
            {"prompt": "\udc00", "completion": "b"},
            "prompt holds \\udc00 alone, half of a surrogate pair, which is no character",
        ),
    ],
)
def test_reason(record, reason):
    with pytest.raises(RecordError) as error:
        parse_record(record, "f:1")
    assert str(error.value) == reason


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "prompt", "completion", "role", "content", "from", "value"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "conversations", "prompt", "completion"]), JSON_VALUES))
def test_any_json_either_parses_or_gives_one_line(record):
    record = json.loads(json.dumps(record))
    try:
        example = parse_record(record, "f:1")
    except RecordError as error:
        reason = str(error)
    else:
        assert any(m["role"] == "assistant" for m in example.messages[example.first_trained_message :])
        return
    assert reason
    assert "\n" not in reason

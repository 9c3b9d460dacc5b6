# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tool calls in their standard form, in the data of every algorithm and from every kind of file."""

import json

import numpy as np
import pytest

from nemo_rl_moe.config.schema_grpo import PromptDataConfig, PromptSourceConfig
from nemo_rl_moe.data.preferences import load_preferences
from nemo_rl_moe.data.prompts import load_prompts
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.data.template_inputs import TemplateInputs
from nemo_rl_moe.errors import ConfigurationError, DataError
from tests.support.chat_templates import THINKING
from tests.support.grpo_inputs import environment_section
from tests.unit.data.conftest import refused

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ARGUMENTS = {"a": 1}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
DEFINITION = f"<|start|>system\n{json.dumps(ADD)}\n<|end|>\n"
CALLED = '<call>{"name": "add", "arguments": {"a": 1}}</call><|end|>'


def calling(**changes):
    return {"role": "assistant", "content": None, "tool_calls": [CALL], **changes}


def call_with(arguments):
    return {**CALL, "function": {"name": "add", "arguments": arguments}}


def parsed_turn(turn):
    return parse_record({"messages": [USER, turn, RESULT, ANSWER]}, "f:1").messages[1]


def text_of(tokenizer, example):
    return tokenizer.decode(example.input_ids)


def trained_text(tokenizer, example):
    return tokenizer.decode(example.input_ids[example.token_mask])


@pytest.fixture
def tokenizer(byte_tokenizer):
    return byte_tokenizer(THINKING)


@pytest.mark.parametrize("content", [None, "", []])
def test_a_turn_may_do_nothing_but_call(content):
    assert parsed_turn(calling(content=content)) == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    turn = calling()
    del turn["content"]
    assert parsed_turn(turn) == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({"a": 1, "b": None}, {"a": 1}), ('{"a": 1, "b": null}', {"a": 1, "b": None}), ("", {}), (None, {}), ({}, {})],
)
def test_arguments_become_an_object(arguments, expected):
    turn = parsed_turn(calling(tool_calls=[call_with(arguments)]))
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": expected}


def test_calls_as_json_and_without_the_wrapper():
    bare = {"name": "add", "arguments": {"a": 1, "b": 2}}
    wrapped = {"type": "function", "function": bare}
    for given in ([bare], json.dumps([wrapped]), json.dumps([bare]), [{"type": "function", **bare}]):
        assert parsed_turn(calling(tool_calls=given))["tool_calls"] == [wrapped]
    with_id = [{"id": "c1", **bare, "arguments": json.dumps(bare["arguments"])}]
    assert parsed_turn(calling(tool_calls=with_id))["tool_calls"] == [{"id": "c1", **wrapped}]
    for none in ("", "[]", "null"):
        assert parsed_turn({**ANSWER, "tool_calls": none}) == ANSWER


def test_parts_of_text_are_joined_as_they_are():
    parts = [{"type": "text", "text": "a ", "image_url": None}, {"type": "text", "text": "b"}]
    assert parse_record({"messages": [{**USER, "content": parts}, ANSWER]}, "f:1").messages[0]["content"] == "a b"


def test_no_calls_are_none():
    messages = [{**USER, "tool_calls": []}, {**ANSWER, "tool_calls": []}]
    assert parse_record({"messages": messages}, "f:1").messages == (USER, ANSWER)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "messages[1].content is null, expected a string, or a list of parts of type text or image, "
            "and no tool_calls",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1] has no content, and no tool_calls"),
        (
            {"messages": [USER, {"role": "assistant", "content": [], "tool_calls": []}]},
            "messages[1].content is empty: an assistant turn needs text or tool_calls to train on",
        ),
        (
            {"messages": [USER, calling(tool_calls=[call_with("{a: 1}")])]},
            "messages[1].tool_calls[0].function.arguments is a string that is not valid JSON: "
            "Expecting property name enclosed in double quotes at character 2",
        ),
        (
            {"messages": [USER, calling(tool_calls=[call_with('{"a": 1, "a": 2}')])]},
            "messages[1].tool_calls[0].function.arguments is a string of JSON: the key 'a' occurs twice in an object",
        ),
        (
            {"messages": [USER, calling(tool_calls=[CALL, call_with("[1]")])]},
            "messages[1].tool_calls[1].function.arguments is JSON of a list, "
            "expected an object, or its JSON as a string",
        ),
        (
            {"messages": [USER, calling(tool_calls=[call_with(3)])]},
            "messages[1].tool_calls[0].function.arguments is a number, expected an object, or its JSON as a string",
        ),
        (
            {"messages": [USER, calling(tool_calls=CALL)]},
            "messages[1].tool_calls is an object, expected a list of objects with function",
        ),
        (
            {"messages": [USER, calling(tool_calls="[add(1)]")]},
            "messages[1].tool_calls is a string that is not valid JSON: Expecting value at character 2",
        ),
        (
            {"messages": [USER, calling(tool_calls=[{"name": "add"}])]},
            "messages[1].tool_calls[0] has no function, expected an object with name and arguments",
        ),
        (
            {"messages": [USER, calling(tool_calls=[{"function": {"arguments": "{}"}}])]},
            "messages[1].tool_calls[0].function.name is null, expected the name of a tool",
        ),
        (
            {"messages": [{**USER, "tool_calls": [CALL]}, ANSWER]},
            "messages[0].tool_calls: in a turn of role user, expected assistant, since only the model calls tools",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "video", "video": "v.mp4"}]}, ANSWER]},
            "messages[0].content[0] is a part of type 'video', expected text or image",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "a"}, {"text": "b"}]}, ANSWER]},
            "messages[0].content[1] is a part without a type, expected text or image",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "text"}]}, ANSWER]},
            "messages[0].content[0].text is null, expected a string",
        ),
        ({"messages": [USER, ANSWER], "tools": ADD}, "tools is an object, expected a list of definitions of tools"),
        ({"messages": [USER, ANSWER], "tools": "add"}, "tools is a string that is not valid JSON: Expecting value at"),
        (
            {"messages": [USER, ANSWER], "tools": [ADD, {"name": "add"}]},
            'tools[1]: expected the definition of a tool: {"type": "function", "function": {"name": ..., "parameters":',
        ),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs: the run itself sets tools; expected other names, such as enable_thinking",
        ),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": [1]},
            "chat_template_kwargs is a list, expected an object, or its JSON as a string",
        ),
    ],
)
def test_reason(record, reason):
    with pytest.raises(RecordError) as error:
        parse_record(record, "f:1")
    assert str(error.value).startswith(reason)


def conversation(**changes):
    return {"messages": [USER, calling(), RESULT, ANSWER], "tools": [ADD], **changes}


def check_conversation(tokenizer, example):
    assert text_of(tokenizer, example) == (
        f"{DEFINITION}<|start|>user\nq<|end|>\n<|start|>assistant\n{CALLED}\n"
        "<|start|>user\n<result>2</result><|end|>\n<|start|>assistant\n<think>\n\n</think>\n\na<|end|>\n"
    )
    assert trained_text(tokenizer, example) == f"{CALLED}<think>\n\n</think>\n\na<|end|>"


def test_definitions_calls_and_results_are_in_the_tokens(tokenizer, write_jsonl):
    as_text = conversation(tools=json.dumps([ADD]), chat_template_kwargs='{"enable_thinking": true}')
    as_text["messages"][1] = calling(tool_calls=[call_with(json.dumps(ARGUMENTS))])
    for example in load_sft_dataset(write_jsonl(conversation(), as_text), "train", tokenizer, 10_000):
        check_conversation(tokenizer, example)


def test_a_table_fills_in_nulls(tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    # A second tool with other parameters: a struct of a table has the keys of both.
    other = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "required": ["b"]}}}
    plain = {"messages": [USER, ANSWER], "tools": None}
    rows = [conversation(), plain, {"messages": [USER, ANSWER], "tools": [other]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    first, second, third = load_sft_dataset(str(tmp_path / "data.parquet"), "train", tokenizer, 10_000)
    check_conversation(tokenizer, first)
    assert "None" not in text_of(tokenizer, first) + text_of(tokenizer, third)
    assert text_of(tokenizer, second).startswith("<|start|>user\nq")
    assert json.dumps(other) in text_of(tokenizer, third)


def test_both_responses_of_a_pair_know_the_tools(tokenizer, write_jsonl):
    record = {"prompt": [USER], "chosen": [calling()], "rejected": [ANSWER], "tools": [ADD]}
    (pair,) = load_preferences(write_jsonl(record), "train", tokenizer, 10_000)
    for example in (pair.chosen, pair.rejected):
        assert text_of(tokenizer, example).startswith(f"{DEFINITION}<|start|>user\nq<|end|>\n<|start|>assistant\n")
    assert trained_text(tokenizer, pair.chosen) == f"<think>\n\n</think>\n\n{CALLED}"
    assert trained_text(tokenizer, pair.rejected) == "<think>\n\n</think>\n\na<|end|>"


def prompts_of(path, tokenizer, **data):
    source = PromptSourceConfig(path=path, split="train", num_items=None, seed=0)
    settings = {
        "prompt_key": "prompt",
        "prompt_template": None,
        "answer_key": "answer",
        "on_bad_line": "stop",
        "shuffle": False,
        "load_timeout_s": 60.0,
        "image_key": "images",
        "image_root": None,
        "max_image_pixels": 1000,
        "tools": [],
        "chat_template_kwargs": {},
        **data,
    }
    environment = environment_section({"kind": "math"}, score_truncated=True)
    config = PromptDataConfig(train=source, validation=None, **settings)
    return load_prompts(source, config, tokenizer, 10_000, environment)


def test_prompts_show_tools_and_may_end_in_a_result(tokenizer, write_jsonl):
    question = {"prompt": [USER], "answer": "2", "tools": [ADD]}
    path = write_jsonl(question, {**question, "tools": None}, {**question, "prompt": [USER, calling(), RESULT]})
    first, second, third = prompts_of(path, tokenizer, prompt_template="<{prompt}>")
    assert tokenizer.decode(first.token_ids) == f"{DEFINITION}<|start|>user\n<q><|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(second.token_ids) == "<|start|>user\n<q><|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(third.token_ids) == (
        f"{DEFINITION}<|start|>user\n<q><|end|>\n<|start|>assistant\n{CALLED}\n"
        "<|start|>user\n<result>2</result><|end|>\n<|start|>assistant\n"
    )
    assert third.record["question"] == "q\n\n2"


def test_the_runs_inputs_and_a_records_own(tokenizer, write_jsonl):
    records = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER], "tools": []},
        {"messages": [USER, ANSWER], "tools": [], "chat_template_kwargs": {"enable_thinking": True}},
    ]
    run_wide = TemplateInputs((ADD,), {"enable_thinking": False})
    first, second, third = load_sft_dataset(write_jsonl(*records), "train", tokenizer, 10_000, run_wide=run_wide)
    assert text_of(tokenizer, first).startswith(DEFINITION)
    assert text_of(tokenizer, second).startswith("<|start|>user")
    # Where thinking is off, the empty block stands in the generation prompt.
    assert trained_text(tokenizer, first) == trained_text(tokenizer, second) == "a<|end|>"
    assert trained_text(tokenizer, third) == "<think>\n\n</think>\n\na<|end|>"
    assert np.array_equal(second.input_ids, third.input_ids)
    (prompt,) = prompts_of(
        write_jsonl({"prompt": "q", "answer": "2"}),
        tokenizer,
        tools=[ADD],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert tokenizer.decode(prompt.token_ids) == (
        f"{DEFINITION}<|start|>user\nq<|end|>\n<|start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_record_names_tools_of_the_run(tokenizer, write_jsonl):
    other = {**ADD, "function": {**ADD["function"], "name": "subtract"}}
    question = {"prompt": "q", "answer": "2"}
    path = write_jsonl({**question, "tools": ["add"]}, {**question, "prompt": "p", "tools": '["add", "subtract"]'})
    one, both = prompts_of(path, tokenizer, tools=[other, ADD])
    assert tokenizer.decode(one.token_ids) == f"{DEFINITION}<|start|>user\nq<|end|>\n<|start|>assistant\n"
    assert (one.inputs.tool_names, one.inputs.tools) == (("add",), None)
    assert tokenizer.decode(both.token_ids).count('"subtract"') == 1
    run_wide = TemplateInputs((other, ADD))
    (example,) = load_sft_dataset(
        write_jsonl({"messages": [USER, ANSWER], "tools": ["add"]}), "train", tokenizer, 10_000, run_wide=run_wide
    )
    assert text_of(tokenizer, example).startswith(DEFINITION)


@pytest.mark.parametrize(
    ("named", "tools", "reason"),
    [
        (["ad"], [ADD], "tools names 'ad', expected one of add; did you mean add?"),
        (["add"], [], "tools names 'add', expected definitions, as the run has no tools"),
        (["add", ADD], [ADD], "tools[0]: expected the definition of a tool"),
    ],
)
def test_a_record_that_names_no_tool_of_the_run_is_refused(named, tools, reason, tokenizer, write_jsonl):
    with pytest.raises(DataError) as error:
        prompts_of(write_jsonl({"prompt": "q", "answer": "2", "tools": named}), tokenizer, tools=tools)
    assert reason in str(error.value)


def test_a_name_that_the_template_does_not_read(tokenizer, write_jsonl):
    run_wide = TemplateInputs(kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigurationError) as error:
        load_sft_dataset(write_jsonl({"messages": [USER, ANSWER]}), "train", tokenizer, 99, run_wide=run_wide)
    assert error.value.problems == [
        "data.chat_template_kwargs.enable_thinkin: the chat template reads no such name; it reads "
        "add_generation_prompt, content, enable_thinking, messages, thinking, tools; did you mean enable_thinking?"
    ]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            THINKING.replace("{%- if tools %}", "{%- if false %}"),
            "there are definitions of tools, and the chat template shows none of them; ",
        ),
        (
            THINKING.replace("m.tool_calls or []", "[]"),
            "a turn calls tools, and the chat template shows no tool calls; ",
        ),
        (None, "there are tools, but the tokenizer has no chat template; "),
    ],
)
def test_what_a_template_leaves_out_is_reported(byte_tokenizer, write_jsonl, template, reason):
    path = write_jsonl(conversation())
    assert refused(load_sft_dataset, path, "train", byte_tokenizer(template), 10_000)[0].startswith(
        f"{path}:1: {reason}"
    )


def test_a_template_that_takes_arguments_for_a_text(byte_tokenizer, write_jsonl):
    """Python's own writing of an object is not what a model is to learn."""
    shown = "{'name': call.function.name, 'arguments': call.function.arguments} | tojson"
    tokenizer = byte_tokenizer(THINKING.replace(shown, "call.function.name ~ call.function.arguments"))
    (example,) = load_sft_dataset(write_jsonl(conversation()), "train", tokenizer, 10_000)
    assert '<call>add{"a": 1}</call>' in text_of(tokenizer, example)


def test_a_tokenizer_with_another_template_for_tools(byte_tokenizer, write_jsonl):
    tokenizer = byte_tokenizer({"default": THINKING.replace("<|start|>user", "<s>user"), "tool_use": THINKING})
    check, other = load_sft_dataset(
        write_jsonl(conversation(), {"messages": [USER, ANSWER]}), "train", tokenizer, 10_000
    )
    check_conversation(tokenizer, check)
    assert text_of(tokenizer, other).startswith("<|start|>user\nq")


FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("functions", [[FUNCTION], json.dumps([FUNCTION])])
def test_the_old_form_of_calls(functions):
    turn = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "add", "content": "2"}
    example = parse_record({"messages": [USER, turn, result, ANSWER], "functions": functions}, "f:1")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert example.messages[2] == {"role": "tool", "name": "add", "content": "2"}
    assert example.inputs.tools == ({"type": "function", "function": FUNCTION},)
    beside = parse_record({"messages": [USER, {**turn, "content": "I add."}, result, ANSWER]}, "f:1").messages[1]
    assert beside == {"role": "assistant", "content": "I add.", "tool_calls": [call]}


@pytest.mark.parametrize("tools", [[FUNCTION], json.dumps([FUNCTION, ADD])])
def test_tools_of_llama_factory_are_bare_functions(tools):
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    turns = [{"from": "human", "value": "q"}, call, {"from": "observation", "value": "2"}]
    record = {"conversations": [*turns, {"from": "gpt", "value": "a"}], "tools": tools}
    expected = ({"type": "function", "function": FUNCTION}, *([ADD] if isinstance(tools, str) else []))
    assert parse_record(record, "f:1").inputs.tools == expected


def test_other_things_under_the_keys_of_the_old_form():
    empty = {**ANSWER, "function_call": {"name": None, "arguments": None}}
    assert parse_record({"messages": [USER, empty], "functions": "sin, cos"}, "f:1") == parse_record(
        {"messages": [USER, ANSWER]}, "f:1"
    )
    both = {**ANSWER, "function_call": {"name": "f"}, "tool_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(RecordError, match=r"messages\[1\] has both function_call and tool_calls, expected one"):
        parse_record({"messages": [USER, both]}, "f:1")

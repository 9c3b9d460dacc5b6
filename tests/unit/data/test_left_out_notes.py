# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a chat template leaves out without being an error: counted in the report, and kept with each sample."""

import json

import pytest

from nemo_rl_moe.data.left_out import (
    CALLS_ALONE,
    CALLS_WITH_FEWER_ARGUMENTS,
    CALLS_WITHOUT_ARGUMENTS,
    CALLS_WITHOUT_NAMES,
    EARLIER_THINKING,
    EMPTY_THINKING,
)
from nemo_rl_moe.data.preferences import load_preferences
from nemo_rl_moe.data.sft import load_sft_dataset
from tests.support.chat_templates import THINKING, THINKING_ALWAYS
from tests.unit.data.conftest import refused
from tests.unit.data.test_tool_calls import prompts_of

USER = {"role": "user", "content": "q"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
LONG = "a thought of more than forty characters, which stands nowhere else"
SHOWN = "{'name': call.function.name, 'arguments': call.function.arguments} | tojson"


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name="add", **arguments):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls):
    return {"messages": [USER, assistant(None, tool_calls=list(calls)), RESULT, assistant("<think>z</think>a")]}


def notes_of(dataset):
    return [(note.text, note.count, note.first) for note in dataset.report.notes]


@pytest.mark.parametrize("thought", ["x", LONG])
@pytest.mark.parametrize("under_a_key", [False, True])
def test_thinking_of_earlier_turns_is_counted(byte_tokenizer, write_jsonl, thought, under_a_key):
    earlier = assistant("b", reasoning_content=thought) if under_a_key else assistant(f"<think>{thought}</think>b")
    last = assistant(f"<think>{thought} too</think>c")
    records = [{"messages": [USER, last]}, {"messages": [USER, earlier, USER, last]}] * 2
    path = write_jsonl(*records)
    dataset = load_sft_dataset(path, "train", byte_tokenizer(THINKING), 10_000)
    assert notes_of(dataset) == [(EARLIER_THINKING, 2, f"{path}:2")]
    assert [example.notes for example in dataset] == [(), (EARLIER_THINKING,)] * 2
    assert f", 2 with {EARLIER_THINKING} (the first: {path}:2)" in dataset.report.summary()


def test_thinking_with_its_newlines_is_counted(byte_tokenizer, write_jsonl):
    """The template trims an answer only behind a block."""
    turns = [USER, assistant("<think>\nx\n</think>\n\nb"), USER, assistant("<think>\ny\n</think>\n\nc")]
    path = write_jsonl({"messages": turns})
    assert notes_of(load_sft_dataset(path, "train", byte_tokenizer(THINKING), 10_000)) == [
        (EARLIER_THINKING, 1, f"{path}:1")
    ]


def test_thinking_that_is_shown_is_not_counted(byte_tokenizer, write_jsonl):
    template = THINKING.replace("loop.index0 > ns.last_question and ", "")
    turns = [USER, assistant("<think>x</think>b"), USER, assistant("<think>y</think>c")]
    path = write_jsonl({"messages": turns})
    assert notes_of(load_sft_dataset(path, "train", byte_tokenizer(template), 10_000)) == []


def test_an_empty_block_that_is_trained_on_is_counted(byte_tokenizer, write_jsonl):
    """The template opens one in the last turn; where thinking is off it is context, and where a turn thinks, full."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    turns = [{"messages": [USER, assistant("a")]}, {"messages": [USER, assistant("<think>x</think>a")]}]
    path = write_jsonl({**turns[0], **off}, *turns)
    dataset = load_sft_dataset(path, "train", byte_tokenizer(THINKING), 10_000)
    assert notes_of(dataset) == [(EMPTY_THINKING, 1, f"{path}:2")]


def test_an_empty_block_that_the_generation_prompt_opens_is_counted(byte_tokenizer, write_jsonl):
    path = write_jsonl(*({"messages": [USER, assistant(content)]} for content in ("<think>x</think>a", "a")))
    dataset = load_sft_dataset(path, "train", byte_tokenizer(THINKING_ALWAYS), 10_000)
    assert notes_of(dataset) == [(EMPTY_THINKING, 1, f"{path}:2")]


def test_an_empty_block_of_the_data_is_counted_by_tags_too(demo_tokenizer, write_jsonl):
    path = write_jsonl({"prompt": "1+1=", "completion": "<think></think>2"}, {"prompt": "1+1=", "completion": "2"})
    assert notes_of(load_sft_dataset(path, "train", demo_tokenizer, 64)) == [(EMPTY_THINKING, 1, f"{path}:1")]


def test_a_pair_counts_once(byte_tokenizer, write_jsonl):
    path = write_jsonl({"prompt": [USER], "chosen": [assistant("a")], "rejected": [assistant("b")]})
    pairs = load_preferences(path, "train", byte_tokenizer(THINKING), 10_000)
    assert notes_of(pairs) == [(EMPTY_THINKING, 1, f"{path}:1")]


PARTIAL = {
    "call.function.name": CALLS_WITHOUT_ARGUMENTS,
    "call.function.arguments | tojson": CALLS_WITHOUT_NAMES,
    "call.function.arguments": CALLS_WITHOUT_NAMES,
    "call.function.arguments.a": CALLS_WITHOUT_NAMES,
    "call.function.name ~ call.function.arguments.a": CALLS_WITH_FEWER_ARGUMENTS,
    "'a tool is called'": CALLS_ALONE,
}
"""What a template shows of a call, and what is said of it; `a` is one of two arguments."""


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "add", "parameters": {}}}]])
@pytest.mark.parametrize("shown", PARTIAL)
def test_calls_that_are_shown_in_part_are_counted(byte_tokenizer, write_jsonl, shown, tools):
    tokenizer = byte_tokenizer(THINKING.replace(SHOWN, shown))
    path = write_jsonl({**calling(call(a="7", b="8")), "tools": tools})
    dataset = load_sft_dataset(path, "train", tokenizer, 10_000)
    assert notes_of(dataset) == [(PARTIAL[shown], 1, f"{path}:1")]
    trained = tokenizer.decode(dataset[0].input_ids[dataset[0].token_mask])
    expected = {"name": "add", **dict.fromkeys(("tojson", "arguments"), '{"a": "7", "b": "8"}'), "a": "7"}
    word = shown.rpartition(".")[2].rpartition(" ")[2]
    assert f"{expected.get(word, '')}</call><|end|>" in trained
    assert "'a'" not in trained


def test_a_template_made_for_one_tool_shows_all_of_its_calls(byte_tokenizer, write_jsonl):
    """It has no word for calls of other names or arguments, such as the made-up ones of a probe."""
    only = "(call.function.arguments.code if call.function.name == 'run' else '')"
    tokenizer = byte_tokenizer(THINKING.replace(SHOWN, only))
    dataset = load_sft_dataset(write_jsonl(calling(call("run", code="print(1)"))), "train", tokenizer, 10_000)
    assert notes_of(dataset) == []
    assert "<call>print(1)</call>" in tokenizer.decode(dataset[0].input_ids)


def test_calls_without_arguments_lack_none(byte_tokenizer, write_jsonl):
    tokenizer = byte_tokenizer(THINKING.replace(SHOWN, "call.function.name"))
    assert notes_of(load_sft_dataset(write_jsonl(calling(call("now"))), "train", tokenizer, 10_000)) == []


def test_turns_are_distinguished_where_names_alone_are_shown(byte_tokenizer, write_jsonl):
    """Turns behind a call whose beginning only stand-ins can find: the earlier turn is rendered in another way."""
    tokenizer = byte_tokenizer(THINKING.replace(SHOWN, "call.function.name"))
    calls = assistant("<think>x</think>", tool_calls=[call(a=1)])
    turns = [USER, calls, RESULT, assistant("<think>y</think>b"), USER, assistant("<think>z</think>c")]
    (example,) = load_sft_dataset(write_jsonl({"messages": turns}), "train", tokenizer, 10_000)
    trained = tokenizer.decode(example.input_ids[example.token_mask])
    assert trained == "<call>add</call><|end|>b<|end|><think>\nz\n</think>\n\nc<|end|>"
    assert set(example.notes) == {CALLS_WITHOUT_ARGUMENTS, EARLIER_THINKING}


def test_a_call_without_a_trace_is_one_error(byte_tokenizer, write_jsonl):
    tokenizer = byte_tokenizer(THINKING.replace("m.tool_calls or []", "[]"))
    path = write_jsonl(*[calling(call(a=number)) for number in range(30)])
    first, last = refused(load_sft_dataset, path, "train", tokenizer, 10_000)
    assert first == (
        f"{path}:1: a turn calls tools, and the chat template shows no tool calls; set policy.tokenizer.chat_template "
        "to a template that does (and 29 more bad lines like it: 2, 3, 4, 5, 6, ...)"
    )
    assert last.endswith("data.on_bad_line=skip skips such lines and counts them")


def test_prompts_are_counted(byte_tokenizer, write_jsonl):
    tokenizer = byte_tokenizer(THINKING.replace(SHOWN, "call.function.name"))
    turns = [USER, assistant(None, tool_calls=[call(a=1)]), RESULT]
    path = write_jsonl({"prompt": turns, "answer": "2"})
    prompts = prompts_of(path, tokenizer)
    assert notes_of(prompts) == [(CALLS_WITHOUT_ARGUMENTS, 1, f"{path}:1")]
    assert prompts[0].notes == (CALLS_WITHOUT_ARGUMENTS,)
    assert json.dumps({"a": 1}) not in tokenizer.decode(prompts[0].token_ids)

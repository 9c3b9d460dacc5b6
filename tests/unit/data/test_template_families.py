# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Masks under chat templates that render the same turn in different ways, by hand; and none that is guessed."""

import numpy as np
import pytest

from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.errors import DataError
from tests.support.chat_templates import (
    CHANNELS,
    NEWLINE_BETWEEN_TURNS,
    PROMPT_OPENS_THINKING,
    THINKING,
    tokenize_example,
)
from tests.unit.data.conftest import refused


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls, **more):
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": functions} if calls else {}), **more}


def result(text):
    return {"role": "tool", "content": text}


def marked(tokenizer, *messages, **record):
    """The text of a conversation, with what is trained on between brackets that nothing else has."""
    example = tokenize_example(parse_record({"messages": list(messages), **record}, "f:1"), tokenizer, 10_000)
    changes = np.flatnonzero(np.diff(example.token_mask)) + 1
    runs = zip(np.split(example.input_ids, changes), np.split(example.token_mask, changes), strict=True)
    return "".join(f"\u27ea{tokenizer.decode(ids)}\u27eb" if mask[0] else tokenizer.decode(ids) for ids, mask in runs)


TWO_CALLS = assistant("", ("add", {"a": 1}), ("add", {"a": 2}), reasoning_content="r")
OTHER_CALLS = assistant("", ("add", {"a": 1, "t": "\u00e9"}), ("sub", {}))
ONE_CALL = assistant("", ("add", {"a": 1}), thinking="r")
MARKED = {
    "thinking is trained on where the template keeps it": (
        THINKING,
        [user("q1"), assistant("<think>\nr1\n</think>\n\na1"), user("q2"), assistant("<think>\nr2\n</think>\n\na2")],
        "<|start|>user\nq1<|end|>\n<|start|>assistant\n\u27eaa1<|end|>\u27eb\n"
        "<|start|>user\nq2<|end|>\n<|start|>assistant\n\u27ea<think>\nr2\n</think>\n\na2<|end|>\u27eb\n",
    ),
    "turns of the assistant in a row": (
        THINKING,
        [user("q"), assistant("a1"), assistant("a2"), assistant("a3")],
        "<|start|>user\nq<|end|>\n<|start|>assistant\n\u27eaa1<|end|>\u27eb\n"
        "<|start|>assistant\n\u27eaa2<|end|>\u27eb\n"
        "<|start|>assistant\n\u27ea<think>\n\n</think>\n\na3<|end|>\u27eb\n",
    ),
    "calls are trained on and results are not": (
        THINKING,
        [user("q"), TWO_CALLS, result("1"), result("2"), assistant("a")],
        "<|start|>user\nq<|end|>\n<|start|>assistant\n\u27ea<think>\nr\n</think>\n\n"
        '<call>{"name": "add", "arguments": {"a": 1}}</call>\n<call>{"name": "add", "arguments": {"a": 2}}</call>'
        "<|end|>\u27eb\n<|start|>user\n<result>1</result>\n<result>2</result><|end|>\n"
        "<|start|>assistant\n\u27ea<think>\n\n</think>\n\na<|end|>\u27eb\n",
    ),
    "arguments as text and null content": (
        PROMPT_OPENS_THINKING,
        [user("q"), OTHER_CALLS, result("1"), result("2"), assistant("a")],
        '<s><User>q<Assistant>\u27ea<call>add\n{"a": 1, "t": "\u00e9"}</call>\n<call>sub\n{}</call><|end|>\u27eb'
        "<results><result>1</result>\n<result>2</result></results>\u27eaa<|end|>\u27eb",
    ),
    "another end token than the model's own is not trained on": (
        CHANNELS,
        [user("q1"), assistant("a1", thinking="r1"), user("q2"), assistant("a2", thinking="r2")],
        "<|start|>user[]q1<s><|start|>assistant\u27ea[final]a1\u27eb<s>"
        "<|start|>user[]q2<s><|start|>assistant\u27ea[analysis]r2<s><|start|>assistant[final]a2<|end|>\u27eb",
    ),
    "turns of channels in a row": (
        CHANNELS,
        [user("q"), assistant("a1"), assistant("a2"), user("r"), assistant("b")],
        "<|start|>user[]q<s><|start|>assistant\u27ea[final]a1\u27eb<s><|start|>assistant\u27ea[final]a2\u27eb<s>"
        "<|start|>user[]r<s><|start|>assistant\u27ea[final]b<|end|>\u27eb",
    ),
    "calls in a channel": (
        CHANNELS,
        [user("q"), ONE_CALL, result("2"), assistant("a"), user("q2")],
        '<|start|>user[]q<s><|start|>assistant\u27ea to=add[commentary]{"a": 1}<call>\u27eb'
        '<|start|>tool to=assistant[commentary]"2"<s><|start|>assistant\u27ea[final]a\u27eb<s><|start|>user[]q2<s>',
    ),
    "a newline between turns that the prompt lacks": (
        NEWLINE_BETWEEN_TURNS,
        [user("q"), assistant("a1"), assistant(" \na2"), user("r"), assistant("b")],
        "<s><user>\nq\n<assistant>\n\u27eaa1<|end|>\u27eb\n<assistant>\n\u27ea \na2<|end|>\u27eb\n"
        "<user>\nr\n<assistant>\n\u27eab<|end|>\u27eb",
    ),
}


@pytest.mark.parametrize(("template", "turns", "text"), MARKED.values(), ids=MARKED.keys())
def test_what_is_trained_on(byte_tokenizer, template, turns, text):
    assert marked(byte_tokenizer(template), *turns) == text


def test_names_for_the_template_decide_what_is_context(byte_tokenizer):
    tokenizer = byte_tokenizer(THINKING)
    turns = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
    assert marked(tokenizer, *turns, chat_template_kwargs={"enable_thinking": False}) == (
        "<|start|>user\nq1<|end|>\n<|start|>assistant\n\u27eaa1<|end|>\u27eb\n"
        "<|start|>user\nq2<|end|>\n<|start|>assistant\n<think>\n\n</think>\n\n\u27eaa2<|end|>\u27eb\n"
    )


def test_a_prompt_that_opens_more_than_the_turns_have(byte_tokenizer):
    tokenizer = byte_tokenizer(PROMPT_OPENS_THINKING)
    turns = [user("q1"), assistant("r</think>a1"), user("q2"), assistant("<b>a2")]
    assert marked(tokenizer, *turns) == (
        "<s><User>q1<Assistant>\u27eaa1<|end|>\u27eb<User>q2<Assistant>\u27ea<b>a2<|end|>\u27eb"
    )
    assert marked(tokenizer, *turns[2:], assistant("a3")).endswith(
        "<Assistant>\u27ea<b>a2<|end|>\u27eb<Assistant>\u27eaa3<|end|>\u27eb"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thinking_under_the_name_that_the_template_reads(byte_tokenizer, key):
    turns = [user("q1"), assistant("a1", **{key: "r1"}), user("q2"), assistant("a2", **{key: "r2"})]
    assert marked(byte_tokenizer(CHANNELS), *turns).endswith(
        "<|start|>assistant\u27ea[analysis]r2<s><|start|>assistant[final]a2<|end|>\u27eb"
    )
    assert marked(byte_tokenizer(THINKING), *turns).endswith(
        "<|start|>assistant\n\u27ea<think>\nr2\n</think>\n\na2<|end|>\u27eb\n"
    )


LOSES = (
    "{% for m in messages if m.role in ['user', 'assistant'] %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
)
LEFT_OUT = (
    "f:1: turn {} is of role {}, and the chat template leaves it out; set policy.tokenizer.chat_template to a template "
    "that shows it, or leave the turn out"
)
LOST_THINKING = (
    "f:1: turn 1 has thinking, and the chat template shows none of it; set policy.tokenizer.chat_template to a "
    "template that does, or leave the thinking out{}"
)
MERGED = "; it works with the system turn's text at the beginning of the first question"
IN_CONTENT = "; it works with the thinking in the content, between <think> and </think>"


@pytest.mark.parametrize(
    ("template", "turns", "problem"),
    [
        # "s" stands in "assistant" too, which does not make it the system turn's.
        (LOSES, [{"role": "system", "content": "s"}, user("q"), assistant("a")], LEFT_OUT.format(0, "system") + MERGED),
        (
            LOSES,
            [user("q"), {"role": "developer", "content": "d" * 99}, assistant("a")],
            LEFT_OUT.format(1, "developer"),
        ),
        (LOSES, [user("q"), assistant("b"), result("1"), assistant("a")], LEFT_OUT.format(2, "tool")),
        (LOSES, [user("q"), assistant("a", reasoning_content="a")], LOST_THINKING.format(IN_CONTENT)),
        (LOSES, [user("q"), assistant("a", thinking="r" * 99)], LOST_THINKING.format(IN_CONTENT)),
        (PROMPT_OPENS_THINKING, [user("q"), assistant("<think>\nr\n</think>a")], LOST_THINKING.format("")),
        (PROMPT_OPENS_THINKING, [user("q"), assistant("<think>\n\n</think>a")], None),
        (LOSES, [user("q"), assistant("<think>r</think>a"), user("q"), assistant("<think>r</think>a")], None),
        (
            LOSES,
            [user("q"), assistant("a", reasoning_content="r"), user("q"), assistant("b", reasoning_content="")],
            None,
        ),
    ],
)
def test_what_a_template_leaves_out_of_a_conversation(byte_tokenizer, template, turns, problem):
    if problem is None:
        assert "\u27ea" in marked(byte_tokenizer(template), *turns)
    else:
        assert refused(marked, byte_tokenizer(template), *turns) == [problem]


def test_a_call_whose_thinking_is_left_out_once_it_is_answered(byte_tokenizer):
    turns = [user("q"), assistant("so", ("add", {"a": 1})), result("2"), assistant("more", ("add", {"a": 3}))]
    last = '<|start|>assistant to=add[commentary]{"a": 3}<call>'
    assert marked(byte_tokenizer(CHANNELS), *turns) == (
        '<|start|>user[]q<s><|start|>assistant\u27ea[analysis]so<s><|start|>assistant to=add[commentary]{"a": 1}<call>'
        f'\u27eb<|start|>tool to=assistant[commentary]"2"<s><|start|>assistant\u27ea[analysis]more<s>{last}\u27eb'
    )
    assert marked(byte_tokenizer(CHANNELS), *turns, result("4"), assistant("a")) == (
        '<|start|>user[]q<s><|start|>assistant\u27ea to=add[commentary]{"a": 1}<call>\u27eb'
        '<|start|>tool to=assistant[commentary]"2"<s><|start|>assistant\u27ea to=add[commentary]{"a": 3}<call>\u27eb'
        '<|start|>tool to=assistant[commentary]"4"<s><|start|>assistant\u27ea[final]a<|end|>\u27eb'
    )


def test_a_call_that_the_template_leaves_out(byte_tokenizer):
    call = assistant("", ("add", {"a": 1}), ("add", {"a": 2}))
    with pytest.raises(DataError, match=r"^f:1: turn 1 calls 2 tools, and the chat template shows fewer calls; set "):
        marked(byte_tokenizer(CHANNELS), user("q"), call, result("2"), assistant("a"))


@pytest.mark.parametrize("template", [THINKING, PROMPT_OPENS_THINKING, CHANNELS])
@pytest.mark.parametrize("answer", ["<think>\n", "<s>", "<|end|>", "<Assistant>x", "assistant\n", "<"])
def test_texts_that_look_like_the_templates_own(byte_tokenizer, template, answer):
    """All of the turn is trained on, whatever it says."""
    turns = [user("q1"), assistant(f"{answer}1"), user(answer), assistant("2"), user("q3")]
    text = marked(byte_tokenizer(template), *turns)
    pieces = [piece.partition("\u27eb")[0] for piece in text.split("\u27ea")[1:]]
    ending = "" if template == CHANNELS else "<|end|>"
    header = "[final]" if template == CHANNELS else ""
    expected = [f"{header}{answer}1{ending}", f"{header}2{ending}"]
    if template == PROMPT_OPENS_THINKING and answer == "<think>\n":
        expected[0] = f"1{ending}"  # the generation prompt holds it
    assert pieces == expected


def test_only_the_completion_of_a_prompt_that_ends_in_a_turn_of_the_assistant(byte_tokenizer):
    record = {"prompt": [user("q"), assistant("a1")], "completion": [assistant("a2")]}
    example = tokenize_example(parse_record(record, "f:1"), tokenizer := byte_tokenizer(THINKING), 10_000)
    assert tokenizer.decode(example.input_ids[example.token_mask]) == "<think>\n\n</think>\n\na2<|end|>"


def test_a_turn_that_opens_another_way_than_the_prompt_is_an_error(byte_tokenizer):
    template = PROMPT_OPENS_THINKING.replace("else '<Assistant>')", "else '<Assistant>[x]')")
    assert refused(marked, byte_tokenizer(template), user("q"), assistant("a")) == [
        "f:1: the tokens of turn 1 cannot be distinguished from the rest: with this chat template the turn opens with "
        "'<Assistant>[x]', and the generation prompt with '<Assistant><think>\\n'; "
        "set policy.tokenizer.chat_template to a template with {% generation %} tags"
    ]

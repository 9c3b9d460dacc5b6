# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuation of a conversation: what is there stays, and what is added is what a fresh rendering has there."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl_moe.data.continuation import Continuation, Extension, NoExtension, SampledTurn
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.template_inputs import TemplateInputs
from tests.support.chat_templates import (
    NEWLINE_BETWEEN_TURNS,
    OPENS_AND_KEEPS_THINKING,
    THINKING,
    make_byte_tokenizer,
    with_think_blocks,
)
from tests.support.conversations import ALL, TOOL, Conversation, Family, Message
from tests.support.quick_list import some_of

STANDS_BEFORE = "the chat template renders the turns before the sampled turn in another way once it follows"
OTHER_END = "after a turn that is not the last, the chat template writes none of the tokens that end the model's turns"
REFUSED = {
    **{
        (name, False, role): (STANDS_BEFORE, 0)
        for role in ("user", "tool")
        for name in ("published DeepSeek-R1", "corrected DeepSeek-R1", "PROMPT_OPENS_THINKING")
    },
    **{
        (name, True, "user"): (STANDS_BEFORE, 0)
        for name in (
            "Mistral, Mixtral",
            *(f"{kind} Mistral{more}" for kind in ("published", "corrected") for more in ("", " without blanks")),
        )
    },
    **{(name, tools, "user"): (OTHER_END, 0) for name in ("gpt-oss", "CHANNELS") for tools in (False, True)},
    ("published DeepSeek-V3", False, "tool"): (STANDS_BEFORE, 1),
}
"""Reason, and turns that are extended before, by the family, whether tools are defined, and who answers.

Those templates open thinking in the generation prompt alone, move definitions to the last question, end a last answer
in another way, or lose the end of results.
"""
NUM_CONVERSATIONS, NUM_TURNS = 12, 3
CASES = [
    (name, tools, role)
    for name, family in ALL.items()
    for tools in (False, True)
    for role in ("user", "tool")
    if (family.shows_tools or not tools) and (family.shows_results or role == "user")
]


@pytest.mark.parametrize(("name", "tools", "role"), some_of(CASES, 20))
def test_a_conversation_is_extended_where_a_fresh_rendering_only_appends(name: str, tools: bool, role: str) -> None:
    family = ALL[name]
    reason, most = REFUSED.get((name, tools, role), ("", NUM_TURNS))
    continuation = Continuation(family.tokenizer)
    inputs = TemplateInputs((TOOL,) if tools else None)
    for seed in range(NUM_CONVERSATIONS):
        conversation = Conversation(family, random.Random(seed), [TOOL] if tools else None)
        before: Sequence[Message] = conversation.messages
        ids = family.encode(conversation.text)
        for place in range(NUM_TURNS):
            piece = conversation.advance(role)
            assert (piece is not None) == (place < most)
            sampled = family.encode(piece or f"3{family.ends[0]}")
            turn = SampledTurn(before, sampled, family.end_ids, inputs)
            if piece is None:
                with pytest.raises(NoExtension, match=f"^{reason}"):
                    continuation.extend(turn, conversation.new)
                break
            found = continuation.extend(turn, conversation.new)
            ids = [*ids, *sampled, *found.token_ids]
            before = found.messages
            assert ids == family.encode(conversation.text)


ASKED: list[Message] = [{"role": "user", "content": "q"}]


def extended(family: Family, sampled: str, *new: Message, before: Sequence[Message] = (), **options: Any) -> Extension:
    turn = SampledTurn(before or ASKED, family.encode(sampled), family.end_ids)
    return Continuation(family.tokenizer, **options).extend(turn, new)


def text_behind(family: Family, sampled: str, *new: Message, **options: Any) -> str:
    return str(family.tokenizer.decode(extended(family, sampled, *new, **options).token_ids))


USER = {"role": "user", "content": "r"}
CHATML = ALL["Qwen2.5, Qwen2-MoE"]
BEHIND = "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"


def test_glue_message_and_generation_prompt_behind_the_end_token() -> None:
    assert text_behind(CHATML, "a<|im_end|>", USER) == BEHIND


@pytest.mark.parametrize("sampled", ["a", "", "a<|im_start|>"])
def test_a_turn_that_was_cut_gets_its_end(sampled: str) -> None:
    assert text_behind(CHATML, sampled, USER) == f"<|im_end|>{BEHIND}"


def test_several_results_and_a_question_at_once() -> None:
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    assert text_behind(CHATML, "calls<|im_end|>", *results, USER) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>"
        f"\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>{BEHIND}"
    )


def test_one_call_is_shown_of_several_that_results_answer() -> None:
    results = [{"role": "tool", "name": "add", "content": text} for text in ("1", "2")]
    header = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
    assert text_behind(ALL["gpt-oss"], "x<|call|>", *results) == f"{header}1<|end|>{header}2<|end|><|start|>assistant"


def test_thinking_that_the_template_would_leave_out() -> None:
    family = ALL["THINKING"]
    sampled = "<think>\nr\n</think>\n\na<|end|>"
    with pytest.raises(NoExtension, match=r"leaves out a part of the turn, such as thinking, once others follow$"):
        extended(family, sampled, USER)
    behind = "\n<|start|>user\nr<|end|>\n<|start|>assistant\n"
    assert text_behind(family, sampled, USER, keep_rewritten=True) == behind
    # Behind a result the thinking stays.
    assert text_behind(family, sampled, {"role": "tool", "content": "r"}).startswith("\n<|start|>user\n<result>r<")


@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_thinking_that_the_generation_prompt_opens(end: str) -> None:
    family = Family(make_byte_tokenizer(OPENS_AND_KEEPS_THINKING), ("<|end|>",))
    result = {"role": "tool", "content": "r"}
    sampled = "r\n</think>\ncall"
    behind = "\n<|start|>tool\nr<|end|>\n<|start|>assistant\n<think>\n"
    assert text_behind(family, f"{sampled}{end}", result) == f"{'' if end else '<|end|>'}{behind}"
    first = extended(family, f"{sampled}{end}", result)
    assert first.messages[1]["content"] == f"<think>\n{sampled}"
    assert first.text == f"<|start|>user\nq<|end|>\n<|start|>assistant\n<think>\n{sampled}<|end|>{behind}"
    with pytest.raises(NoExtension, match=f"^{STANDS_BEFORE}$"):
        extended(family, f"{sampled}{end}", USER)
    # Thoughts without an end.
    with pytest.raises(NoExtension, match=f"^{STANDS_BEFORE}$"):
        extended(family, "r", USER)


NEEDS_CALLS = with_think_blocks("", "<think>\\n").replace(
    "{{- m.content }}",
    "{{- raise_exception('no call') if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls else m.content }}",
)
"""As MiniMax-M2's: it takes results behind calls alone, and the generation prompt opens thinking."""


def test_thinking_that_is_kept_where_results_follow_calls_alone() -> None:
    family = Family(make_byte_tokenizer(NEEDS_CALLS), ("<|end|>",))
    result = {"role": "tool", "name": "add", "content": "r"}
    behind = "<|start|>tool\nr<|end|><|start|>assistant\n<think>\n"
    assert text_behind(family, "r1\n</think>\ncall<|end|>", result) == behind
    # In a second turn, too, behind what stands for the first.
    first = extended(family, "r1\n</think>\ncall<|end|>", result)
    second = extended(family, "r2\n</think>\ncall<|end|>", result, before=first.messages)
    assert family.tokenizer.decode(list(second.token_ids)) == behind
    # Thoughts without an end.
    with pytest.raises(NoExtension, match=f"^{STANDS_BEFORE}$"):
        extended(family, "r1<|end|>", result)


def test_results_are_named_by_the_ids_that_the_model_wrote() -> None:
    """Kimi-K2 numbers the calls of a conversation."""
    family = ALL["corrected Kimi-K2"]
    result = {"role": "tool", "name": "add", "content": "r"}
    before: Sequence[Message] = ({"role": "user", "content": "q"},)
    for number in range(3):
        call = f"<|tool_call_begin|>functions.add:{number}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        sampled = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|><|im_end|>"
        found = extended(family, sampled, result, before=before)
        assert family.tokenizer.decode(list(found.token_ids)) == (
            f"<|im_system|>add<|im_middle|>## Return of functions.add:{number}\nr<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>"
        )
        before = found.messages


def test_thinking_of_a_turn_before_the_sampled_one() -> None:
    family = ALL["THINKING"]
    first = extended(family, "<think>\nr\n</think>\n\na<|end|>", {"role": "tool", "content": "r"})
    with pytest.raises(NoExtension, match=f"^{STANDS_BEFORE}$"):
        extended(family, "b<|end|>", USER, before=first.messages)


def test_the_conversation_so_far_holds_what_was_sampled() -> None:
    found = extended(CHATML, "so it is<|im_end|>", USER)
    assert found.messages == ({"role": "user", "content": "q"}, {"role": "assistant", "content": "so it is"}, USER)


def test_an_end_token_of_another_kind() -> None:
    family = Family(make_byte_tokenizer(THINKING), ("<|end|>", "<s>"))
    with pytest.raises(NoExtension, match=r"^the turn ends with '<s>', but if another .* ends it with '<\|end\|>'"):
        extended(family, "a<s>", USER)
    # A stop token that is a text like any other stands in the turn.
    family = Family(make_byte_tokenizer(THINKING), ("<|end|>", ">"))
    assert text_behind(family, "<c>", USER) == "<|end|>\n<|start|>user\nr<|end|>\n<|start|>assistant\n"


DEPENDS = THINKING.replace("{{- content }}", "{{- content }}{{- '!' if 'qx7' in content else '' }}")
WITHOUT_DEVELOPERS = THINKING.replace(
    "    {%- else %}\n        {{- '<|start|>' + m.role", "{%- elif m.role == 'user' %}{{- '<|start|>' + m.role"
)
QUESTIONS_END_ALONE = NEWLINE_BETWEEN_TURNS.replace("'<|end|>'", "'.'").replace(
    "m.content + '\\n' }}", "m.content + '<|end|>' }}"
)
TWICE = NEWLINE_BETWEEN_TURNS.replace("m.content + '<|end|>'", "m.content + m.content + '<|end|>'")


@pytest.mark.parametrize(
    ("template", "new", "problem"),
    [
        (DEPENDS, USER, "the text that the chat template writes after a turn depends on the turn's text"),
        (TWICE, USER, "the chat template does not show the text of a turn exactly once"),
        (
            WITHOUT_DEVELOPERS,
            {**USER, "role": "developer"},
            "messages[0] is of role developer, and the chat template leaves it out; set policy.tokenizer.chat_template",
        ),
        (QUESTIONS_END_ALONE, USER, f"{OTHER_END}: '<|end|>'"),
        (None, USER, "the tokenizer has no chat template; set policy.tokenizer.chat_template"),
        (THINKING, {**USER, "role": "assistant"}, "messages[0].role is 'assistant', expected tool, user, system, "),
        (
            THINKING,
            {**USER, "content": [{"type": "image", "image": "a.png"}]},
            "messages[0].content has images, expected text",
        ),
    ],
)
def test_what_cannot_be_continued(template: str | None, new: Message, problem: str) -> None:
    with pytest.raises((NoExtension, RecordError)) as error:
        extended(Family(make_byte_tokenizer(template), ("<|end|>",)), "a<|end|>", new)
    assert str(error.value).startswith(problem)


def test_a_malformed_message() -> None:
    with pytest.raises(RecordError, match=r"^messages\[0\]\.role is 'tol', expected .* did you mean"):
        extended(CHATML, "a<|im_end|>", {"role": "tol", "content": "r"})


@pytest.mark.parametrize("name", ["corrected Mistral", "published Mistral without blanks"])
def test_a_template_that_counts_turns_but_not_those_that_call(name: str) -> None:
    """As a text, the call counts as a turn: the next question would stand in the wrong place."""
    family = ALL[name]
    conversation = Conversation(family, random.Random(0), None)
    continuation, before, ids = Continuation(family.tokenizer), conversation.messages, family.encode(conversation.text)
    for role in ("tool", "user", "tool"):
        piece = conversation.advance(role)
        assert piece is not None
        sampled = family.encode(piece)
        found = continuation.extend(SampledTurn(before, sampled, family.end_ids), conversation.new)
        ids, before = [*ids, *sampled, *found.token_ids], list(found.messages)
        assert ids == family.encode(conversation.text)

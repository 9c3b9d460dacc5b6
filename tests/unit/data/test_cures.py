# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cures in errors on conversations that a chat template cannot show: each was tried, and works."""

from typing import Any

import pytest

from nemo_rl_moe.data.chat_template import prompt_renderer_for, renderer_for
from nemo_rl_moe.data.left_out import TEXT_BESIDE_CALLS
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.data.template_inputs import NO_INPUTS
from nemo_rl_moe.data.template_names import names_read
from nemo_rl_moe.data.template_renderer import TemplateRenderer
from tests.support.chat_templates import CHANNELS, make_byte_tokenizer

SYSTEM = {"role": "system", "content": "s"}
QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
THOUGHT = {**ANSWER, "reasoning_content": "r"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def calling(text: str, *values: int) -> dict[str, Any]:
    calls = [{"id": f"c{n}", "function": {"name": "add", "arguments": {"a": n}}} for n in values]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": f"r{number}"}


_TURNS = """\
{%- for m in messages %}
    {{- '<|start|>' + m.role + ' ' }}
    {%- if m.tool_calls %}CALLS{% else %}{{- m.content }}{% endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant ' }}{% endif %}
"""
CALL = "{{- call.function.name + call.function.arguments | tojson + ';' }}"
CALLS_ALONE = _TURNS.replace("CALLS", "{% for call in m.tool_calls %}" + CALL + "{% endfor %}")
ONE_CALL = CALLS_ALONE.replace("m.tool_calls %}" + CALL, "m.tool_calls[:1] %}" + CALL)
THINKS_IF = CALLS_ALONE.replace(
    "{{- m.content }}", "{{- (m.reasoning_content or '' if effort in ['high', 'max'] else '') + m.content }}"
)
LISTS_ALONE = (
    "{% for m in messages %}<|start|>"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
)


def refusing(condition: str) -> str:
    return "{{ raise_exception('no') if " + condition + " }}" + CALLS_ALONE


CASES = {
    "a setting": (THINKS_IF, [QUESTION, THOUGHT], 'data.chat_template_kwargs: {effort: "high"}'),
    "thinking in the content": (
        CALLS_ALONE,
        [QUESTION, THOUGHT],
        "the thinking in the content, between <think> and </think>",
    ),
    "single calls": (
        ONE_CALL,
        [QUESTION, calling("", 1, 2), result(1), result(2), ANSWER],
        "one call a turn, each before its result",
    ),
    "a question that begins with the system turn": (
        refusing("messages[0].role == 'system'"),
        [SYSTEM, QUESTION, ANSWER],
        "the system turn's text at the beginning of the first question",
    ),
    "tools": (refusing("not tools"), [QUESTION, ANSWER], "definitions of tools (data.tools)"),
    "no texts beside calls": (
        refusing("messages | selectattr('tool_calls') | selectattr('content') | list"),
        [QUESTION, calling("so", 1), result(1), ANSWER],
        "no texts beside tool calls",
    ),
    "fewer turns to train on": (
        CALLS_ALONE.replace("m.role + ' '", "m.role + (loop.length if loop.index == 2 else '') | string + ' '"),
        [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "b"}],
        "other assistant turns than the last as context (train: false)",
    ),
}


def problem_of(template: str, turns: list[dict[str, Any]]) -> str:
    found = renderer_for(make_byte_tokenizer(template))([parse_record({"messages": turns}, "f:1")])[0]
    assert isinstance(found, str), found
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_cure_that_works_is_named(case: str) -> None:
    template, turns, words = CASES[case]
    assert problem_of(template, turns).endswith(f"; it works with {words}")


def test_where_nothing_helps_another_template_does() -> None:
    problem = problem_of("{{ raise_exception('no') }}", [SYSTEM, QUESTION, THOUGHT])
    assert problem == (
        "the chat template refuses the conversation: no; set policy.tokenizer.chat_template to a template that takes it"
    )


def test_prompts_too() -> None:
    render = prompt_renderer_for(make_byte_tokenizer(refusing("messages[0].role == 'system'")))
    found = render([PromptRecord("f:1", (SYSTEM, QUESTION), False, {}, NO_INPUTS)])[0]
    assert str(found).endswith("; it works with the system turn's text at the beginning of the first question")


def test_a_cure_is_looked_for_once_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    render = TemplateRenderer.render
    monkeypatch.setattr(
        TemplateRenderer, "render", lambda *given, **more: (rendered.append(1), render(*given, **more))[1]
    )
    renderer = renderer_for(make_byte_tokenizer(THINKS_IF))
    example = parse_record({"messages": [QUESTION, THOUGHT]}, "f:1")
    first = renderer([example])
    looked = len(rendered)
    assert renderer([example]) == first
    # Of the second one: itself, and the cure.
    assert (looked > 3, len(rendered) - looked) == (True, 2)


def test_a_template_that_needs_tools_takes_them() -> None:
    """Whether it shows them cannot be seen in a conversation without."""
    record = {"messages": [QUESTION, calling("", 1), result(1), ANSWER], "tools": [TOOL]}
    template = "{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}" + CALLS_ALONE
    found = renderer_for(make_byte_tokenizer(template))([parse_record(record, "f:1")])[0]
    assert not isinstance(found, str)
    assert [found.text[first:end] for first, end in found.spans] == ['add{"a": 1};<|end|>', "a<|end|>"]


def test_a_template_that_takes_lists_of_parts_alone() -> None:
    assert problem_of(LISTS_ALONE, [QUESTION, ANSWER]) == (
        "the chat template shows no content that is a text; set policy.tokenizer.chat_template to a template that does"
    )


def test_text_beside_calls_that_is_left_out() -> None:
    renderer = renderer_for(make_byte_tokenizer(CALLS_ALONE))
    turns = [QUESTION, calling("so it is", 1), result(1), ANSWER]
    found = renderer([parse_record({"messages": turns}, "f:1")])[0]
    assert not isinstance(found, str)
    assert found.notes == (TEXT_BESIDE_CALLS,)
    of_none = [QUESTION, calling("", 1), result(1), ANSWER]
    assert renderer([parse_record({"messages": of_none}, "f:1")])[0].notes == ()  # type: ignore[union-attr]
    assert problem_of(CALLS_ALONE, turns[:2]) == (
        "turn 1 has a text beside its tool calls, and the chat template shows none of it; set "
        "policy.tokenizer.chat_template to a template that does, or leave the text out; it works with no texts beside "
        "tool calls"
    )


def test_text_beside_calls_that_goes_once_they_are_answered() -> None:
    turns = [QUESTION, calling("so", 1), {"role": "tool", "content": "2"}, ANSWER]
    found = renderer_for(make_byte_tokenizer(CHANNELS, more_special=["<call>"]))(
        [parse_record({"messages": turns}, "f:1")]
    )
    assert found[0].notes == (TEXT_BESIDE_CALLS,)  # type: ignore[union-attr]


def test_names_with_the_texts_that_they_are_compared_with() -> None:
    template = (
        "{% if not a is defined %}{% set a = 'x' %}{% elif a not in ['h', 'l'] %}{{ b }}{% endif %}{{ b == 'q' }}"
    )
    assert names_read(template) == {"a": ("h", "l"), "b": ("q",)}

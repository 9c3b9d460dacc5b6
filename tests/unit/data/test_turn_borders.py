# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Borders of turns under templates that write more around a turn than the model does."""

import pytest

from nemo_rl_moe.data.chat_template import renderer_for
from nemo_rl_moe.data.records import parse_record
from tests.support.chat_templates import make_byte_tokenizer

QUESTION = {"role": "user", "content": "q"}
A1, A2 = ({"role": "assistant", "content": text} for text in ("a1", "a2"))
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}

# As Phi-3's: the end token of texts stands behind the last turn, whoever it is of.
ENDED_TWICE = """\
{%- for m in messages %}{{- '<' + m.role + '>' + m.content + '<|end|>\\n' }}{% endfor %}
{{- '<assistant>' if add_generation_prompt else '<s>' }}
"""
# As Command R7B's: a further turn is opened behind the last one, whatever is asked.
OPENED_BEHIND = """\
{%- for m in messages %}{{- '<|start|>' + m.role + '>' + m.content + '<|end|>' }}{% endfor %}
{{- '<|start|>assistant>' }}
"""
# As Gemma 4's: results stand in the model's turn. The prompt behind them has no header; one template writes it there.
RESULTS_WITHIN = """\
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- 'response:' + m.content + '<s>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '\\n' }}
        {%- for call in m.tool_calls or [] %}{{- 'call:' + call.function.arguments | tojson }}{% endfor %}
        {{- '<s>' if m.tool_calls else m.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|start|>assistant\\n' }}{% endif %}
"""
# As Gemma 4's with a text beside calls: it stands behind the results.
TEXT_BEHIND_RESULTS = """\
{%- for m in messages if m.role != 'tool' %}
    {{- '<|start|>' + m.role + '\\n' }}
    {%- for call in m.tool_calls or [] %}{{- 'call:' + call.function.arguments | tojson }}{% endfor %}
    {%- for r in messages if r.role == 'tool' and m.tool_calls %}{{- 'r:' + r.content }}{% endfor %}
    {{- m.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{% endif %}
"""


def spans(template, *messages, stops=("<|end|>", "<s>")):
    """The text of the conversation and the pieces to train on; or the problem."""
    found = renderer_for(make_byte_tokenizer(template), stop_texts=stops)(
        [parse_record({"messages": list(messages)}, "f:1")]
    )
    if isinstance(found[0], str):
        return found[0]
    return found[0].text, [found[0].text[first:end] for first, end in found[0].spans]


@pytest.mark.parametrize(
    ("stops", "last"), [(("<|end|>", "<s>"), "a2<|end|>"), (("<|end|>",), "a2<|end|>"), (("<s>",), "a2<|end|>\n<s>")]
)
def test_an_end_of_the_text_behind_the_end_of_the_turn(stops, last):
    _, trained = spans(ENDED_TWICE, QUESTION, A1, QUESTION, A2, stops=stops)
    assert trained == ["a1<|end|>", last]


def test_a_further_turn_that_is_opened_behind_the_last():
    text, trained = spans(OPENED_BEHIND, QUESTION, A1, QUESTION, A2)
    assert trained == ["a1<|end|>", "a2<|end|>"]
    assert text.endswith("a2<|end|>")


def test_a_header_behind_results_is_none_of_the_models():
    _, trained = spans(RESULTS_WITHIN, QUESTION, {**CALLING, "content": ""}, RESULT, A1)
    assert trained == ['call:{"a": 1}<s>', "a1<|end|>"]


def test_a_turn_around_the_results_is_refused():
    problem = spans(TEXT_BEHIND_RESULTS, QUESTION, CALLING, RESULT, A1)
    assert problem.startswith("the tokens of turn 1 cannot be distinguished from the rest: with this chat template ")


# As Nemotron Nano 2's: the generation prompt is left out behind a turn of the assistant, whose header is still written.
NO_PROMPT_BEHIND_ASSISTANT = """\
{%- for m in messages %}{{- '<|start|>' + m.role + '\\n' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'assistant' %}{{- '<|start|>assistant\\n' }}{% endif %}
"""


def test_the_header_of_a_second_turn_in_a_row_is_not_trained_on():
    text, found = spans(NO_PROMPT_BEHIND_ASSISTANT, QUESTION, A1, QUESTION, A2)
    assert found == ["a1<|end|>", "a2<|end|>"], text
    result = spans(NO_PROMPT_BEHIND_ASSISTANT.replace("<|start|>", "head"), QUESTION, A1, A2)
    assert "'headassistant' is written between the turn and the assistant's turn before it" in str(result)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns that records mark as context, and what is trained on of the others."""

from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.data.preferences import parse_preference
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import parse_record
from tests.support.chat_templates import make_byte_tokenizer, tokenize_example

CHATML = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
TAGGED = CHATML.replace(
    "{{ m.content }}<|end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}",
)


def turns(**marks: Any) -> list[dict[str, Any]]:
    """Two questions and answers, the marks in the first answer."""
    return [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", **marks},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
    ]


def trained(record: dict[str, Any], template: str) -> list[str]:
    tokenizer = make_byte_tokenizer(template)
    found = tokenize_example(parse_record(record, "f:1"), tokenizer, 1000)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], found.token_mask, [False]])))
    return [tokenizer.decode(found.input_ids[first:end]) for first, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
@pytest.mark.parametrize(
    "marks", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False}, {"training": False, "loss": 0}]
)
def test_a_turn_that_is_marked_as_context(marks: dict[str, Any], template: str) -> None:
    assert trained({"messages": turns(**marks)}, template) == ["a2<|end|>"]


@pytest.mark.parametrize("marks", [{}, {"weight": 1}, {"loss": True}, {"train": None}])
def test_a_turn_that_is_not(marks: dict[str, Any]) -> None:
    assert trained({"messages": turns(**marks)}, CHATML) == ["a1<|end|>", "a2<|end|>"]


def test_no_template_sees_a_mark() -> None:
    shows = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.keys() | list | length }}")
    assert trained({"messages": turns(weight=1)}, shows) == ["a12<|end|>", "a22<|end|>"]


def test_marks_in_a_completion_and_in_sharegpt() -> None:
    answer = [*turns(weight=0)[1:]]
    assert trained({"prompt": turns()[:1], "completion": answer}, CHATML) == ["a2<|end|>"]
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "train": False}]
    said += [{"from": "human", "value": "q", "train": False}, {"from": "gpt", "value": "b", "train": True}]
    assert trained({"conversations": said}, CHATML) == ["b<|end|>"]


def test_marks_in_a_preference() -> None:
    bad = [*turns(loss=False)[:3], {"role": "assistant", "content": "b2"}]
    found = parse_preference({"prompt": "q", "chosen": turns(loss=False)[1:], "rejected": bad[1:]}, "f:1")
    assert found.chosen.trained_messages == found.rejected.trained_messages == frozenset({3})


MARKS = "expected 0 or false (context), 1 or true (trained on)"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (turns(weight=0.5), f"messages[1].weight is '0.5', {MARKS}"),
        (turns(loss="false"), f"messages[1].loss is 'false', {MARKS}"),
        (turns(weight=0, loss=True), "messages[1] has marks that contradict each other: weight 0, loss True"),
        (
            turns(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}]),
            "messages[1] has 'train_detail', which is not read, expected weight, loss, train, training: a turn is"
            " trained on as a whole, or is context",
        ),
        (
            [{"role": "user", "content": "q", "train": True}, *turns()[1:]],
            "messages[0].train marks a turn of role user, expected assistant: the model learns its own turns alone",
        ),
        (
            turns(weight=0)[:2],
            "every turn of the assistant is marked as context (weight, loss, train, training): nothing to train on",
        ),
    ],
)
def test_marks_that_cannot_be_honoured(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_record({"messages": messages}, "f:1")
    assert str(caught.value) == reason

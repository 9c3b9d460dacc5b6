# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that fail: one clear error each."""

import sys
from typing import Any

import pytest

from nemo_rl_moe.data.chat_template import renderer_for
from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.data.template_inputs import NO_INPUTS
from nemo_rl_moe.errors import DataError
from tests.support.chat_templates import make_byte_tokenizer, tokenize_example
from tests.unit.data.conftest import refused

EXAMPLE = parse_record({"prompt": "q", "completion": "a"}, "f:1")
REFUSES = "f:1: the chat template refuses the conversation: "
INVALID = "the chat template is not valid Jinja: line 1: "


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ raise_exception('a' * 100000) }}", f"{REFUSES}aaa"),
        ("{{ 1 // 0 }}", f"{REFUSES}ZeroDivisionError: integer division or modulo by zero"),
        ("{% if messages | length > 1 %}{{ 10.0 ** 400 }}{% endif %}", f"{REFUSES}OverflowError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", f"{REFUSES}RecursionError: "),
        ("{{ messages[0].update({'content': 'other'}) }}", REFUSES),
        ("{{ ''.__class__.__base__ }}", REFUSES),
        ("{% include 'a' %}", REFUSES),
        ("{% break %}", f"{REFUSES}SyntaxError: 'break' outside loop"),
        ("{% for %}", INVALID),
        ("{% block a %}{% endblock %}{% block a %}{% endblock %}", f"{INVALID}block 'a' defined twice"),
    ],
)
def test_one_line(byte_tokenizer, template, line):
    (reported,) = refused(tokenize_example, EXAMPLE, byte_tokenizer(template), 100)
    assert reported.startswith(line)
    assert len(reported) < 500


def test_a_conversation_that_is_nested_too_deeply(byte_tokenizer):
    """It was read where fewer calls were on the stack."""
    arguments: Any = {}
    for _ in range(2_000):
        arguments = {"a": arguments}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        example = parse_record({"messages": turns}, "f:1")
    finally:
        sys.setrecursionlimit(limit)
    template = "{% for message in messages %}{{ message['role'] }}{{ message['tool_calls'] }}{% endfor %}"
    assert refused(tokenize_example, example, byte_tokenizer(template), 100) == [
        "f:1: the conversation is nested too deeply"
    ]


def test_brackets_that_are_nested_too_deeply_are_an_error() -> None:
    with pytest.raises(
        DataError, match="the chat template is not valid Jinja: brackets or blocks are nested too deeply"
    ):
        renderer_for(make_byte_tokenizer("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"), NO_INPUTS)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that fail: one clear error each."""

import pytest

from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.errors import DataError
from tests.support.one_example import tokenize_example

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
    with pytest.raises(DataError) as error:
        tokenize_example(EXAMPLE, byte_tokenizer(template), 100)
    (reported,) = error.value.problems
    assert reported.startswith(line)
    assert len(reported) < 500

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that never end, fill the memory or fail: one clear error; and the next template works."""

import contextlib
import threading

import psutil
import pytest

from nemo_rl_moe.data import template_process
from nemo_rl_moe.data.chat import batch_tokenizer
from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.data.template_process import MEMORY_LIMIT, TemplateProcess
from nemo_rl_moe.errors import DataError
from tests.support.one_example import tokenize_example

EXAMPLE = parse_record({"prompt": "q", "completion": "a"}, "f:1")
GOOD = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
FILLS_MEMORY = (
    "{% set ns = namespace(x='x' * 1000000) %}"
    "{% for i in range(20) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
WITH_AN_ANSWER = "{% if messages | length > 1 %}"
CANNOT_RENDER = "the chat template cannot render even one message: "
REFUSES = "f:1: the chat template refuses the conversation: "
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def problem(tokenizer):
    """The error of one conversation."""
    with pytest.raises(DataError) as error:
        tokenize_example(EXAMPLE, tokenizer, 100)
    (line,) = error.value.problems
    return line


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (
            "{{ 1 // 0 }}",
            f"{CANNOT_RENDER}ZeroDivisionError: integer division or modulo by zero",
        ),
        (
            "{% block a %}{% endblock %}{% block a %}{% endblock %}",
            "the chat template is not valid Jinja: line 1: block 'a' defined twice",
        ),
        (
            f"{{{{ {'9' * 5000} }}}}",
            "the chat template is not valid Jinja: ",
        ),
        ("{% break %}", f"{CANNOT_RENDER}SyntaxError: 'break' outside loop"),
        ("{{ 10.0 ** 400 }}", f"{CANNOT_RENDER}OverflowError: "),
        (
            "{{ range(10 ** 9) | list }}",
            f"{CANNOT_RENDER}OverflowError: Range too big",
        ),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            f"{CANNOT_RENDER}Recursion",
        ),
        ("{% include 'a' %}", "the chat template refers to another template, and there is none beside it"),
        ("{{ '(' * 1000 }}" + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "the chat template is not valid Jinja: "),
        pytest.param(ENDLESS, "the chat template takes longer than 2 s to render", marks=pytest.mark.slow),
        pytest.param(
            "{{ 7 ** (10 ** 9) }}", "the chat template takes longer than 2 s to render", marks=pytest.mark.full
        ),
        # The tests of memory below fill it, too.
        pytest.param(
            FILLS_MEMORY, "the chat template needs more than 384 MB of memory to render", marks=pytest.mark.slow
        ),
        ("{{ 'x' * 10 ** 11 }}", "the chat template needs more than 384 MB of memory to render"),
        # Only a conversation with an answer shows it: the sample is named.
        pytest.param(
            f"{WITH_AN_ANSWER}{ENDLESS}{{% endif %}}",
            "f:1: the chat template takes longer than 2 s",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{WITH_AN_ANSWER}{FILLS_MEMORY}{{% endif %}}",
            "f:1: the chat template needs more than 384 MB",
            marks=pytest.mark.slow,
        ),
        (
            WITH_AN_ANSWER + "{{ 1 // 0 }}{% endif %}",
            f"{REFUSES}Zero",
        ),
        (
            WITH_AN_ANSWER + "{{ 'x' * 2000000 }}{% endif %}",
            "f:1: the chat template makes 2,000,000 characters of it, expected at most 1,0",
        ),
        ("{{ raise_exception('a' * 100000) }}", f"{REFUSES}aaa"),
    ],
)
def test_one_line(byte_tokenizer, template, line):
    reported = problem(byte_tokenizer(template))
    assert reported.startswith(line)
    assert len(reported) < 500
    example = tokenize_example(EXAMPLE, byte_tokenizer(GOOD), 100)
    assert example.num_trained_tokens() == 2


def test_memory_stays_small(byte_tokenizer, monkeypatch):
    """Of the process that renders, until it ends."""
    monkeypatch.setattr(template_process, "_shared", None)
    process = template_process.template_process()
    setup = template_process.TemplateSetup("{{ messages }}", {}, "", ())
    with contextlib.suppress(template_process.TemplateFailure):
        process.variables(setup)
    rendering = psutil.Process(process._child.pid)
    largest, is_over = 0, threading.Event()

    def watch():
        nonlocal largest
        with contextlib.suppress(psutil.NoSuchProcess):
            while not is_over.wait(0.002):
                largest = max(largest, rendering.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    problem(byte_tokenizer(FILLS_MEMORY))
    is_over.set()
    watching.join()
    assert 2**25 < largest < MEMORY_LIMIT + (256 << 20)


def test_a_long_conversation_is_no_endless_one(byte_tokenizer):
    """The limit is one of each rendering: a conversation of hundreds of turns takes more than one."""
    turns = [{"role": role, "content": "x" * 50} for _ in range(300) for role in ("user", "assistant")]
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    example = tokenize_example(parse_record({"messages": turns}, "f:1"), byte_tokenizer(template), 10**6)
    assert example.num_trained_tokens() == 300 * (len("assistant:") + 50 + 1)


def test_the_process_ends_when_nobody_needs_it(monkeypatch):
    monkeypatch.setattr(template_process, "_shared", None)
    process = template_process.template_process()
    assert template_process.template_process() is process
    with pytest.raises(template_process.TemplateFailure, match="not valid Jinja"):
        process.variables(template_process.TemplateSetup("{% for %}", {}, "", ()))
    child = process._child
    assert child is not None
    assert child.poll() is None
    del process
    assert child.poll() is not None
    assert template_process._shared() is None


@pytest.mark.full
def test_an_interrupted_question_is_not_answered_by_the_next_reply(monkeypatch):
    process = TemplateProcess()
    setup = template_process.TemplateSetup(GOOD, {}, "", ())
    assert process.variables(setup) == ["messages"]
    first = process._child

    class Interrupted(BaseException):
        pass

    class Pipe:
        def __init__(self, pipe):
            self._pipe = pipe

        def readline(self):
            raise Interrupted

        def close(self):
            self._pipe.close()

    monkeypatch.setattr(first, "stdout", Pipe(first.stdout))
    request = template_process.RenderRequest(EXAMPLE.messages, None, {}, None)
    with pytest.raises(Interrupted):
        process.render(setup, [request])
    assert first.poll() is not None
    (rendered,) = process.render(setup, [request])
    assert rendered.text == "q<|end|>a<|end|>"


@pytest.mark.full
def test_many_conversations_keep_their_order(byte_tokenizer):
    """More than are sent at a time, and longer ones than fit together."""
    lengths = [*range(1, 250), 700_000, 1, 700_000, 2]
    examples = [parse_record({"prompt": "q", "completion": "a" * length}, f"f:{length}") for length in lengths]
    tokenized = batch_tokenizer(byte_tokenizer(GOOD), 10**6)(examples)
    assert [example.num_trained_tokens() - 1 for example in tokenized] == lengths


@pytest.mark.full
def test_the_conversation_at_fault_is_named_among_many(byte_tokenizer):
    template = GOOD + "{% if messages[0].content == 'q7' %}" + FILLS_MEMORY + "{% endif %}"
    examples = [parse_record({"prompt": f"q{line}", "completion": "a"}, f"f:{line}") for line in range(20)]
    with pytest.raises(DataError, match=r"^f:7: the chat template needs more than 384 MB of memory to render$"):
        batch_tokenizer(byte_tokenizer(template), 100)(examples)

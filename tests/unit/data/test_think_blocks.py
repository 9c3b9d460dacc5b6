# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns without thinking behind a generation prompt that opens a think block, and thinking that stands in a content."""

import pytest

from nemo_rl_moe.data.chat_template import renderer_for
from nemo_rl_moe.data.left_out import EARLIER_THINKING, EMPTY_THINKING
from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.data.turn_spans import UNPROMPTED
from tests.support.chat_templates import OPENS_AND_KEEPS_THINKING, make_byte_tokenizer, with_think_blocks

QUESTION = {"role": "user", "content": "q"}
GLM, NEMOTRON, DEEPSEEK, COHERE = (
    ("</think>", "<think>"),
    ("<think></think>", "<think>\\n"),
    ("</think>", "<think></think>"),
    ("<s>", "<|START_THINKING|>"),
)
"""What turns without thinking have, and what the generation prompt opens."""


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def marked(template, *messages, stops=("<|end|>",), **record):
    """The text with what is trained on in brackets, and the notes; or the problem."""
    example = parse_record({"messages": list(messages), **record}, "f:1")
    found = renderer_for(make_byte_tokenizer(template), stop_texts=stops)([example])[0]
    if isinstance(found, str):
        return found
    text = found.text
    for first, end in reversed(found.spans):
        text = f"{text[:first]}\u27ea{text[first:end]}\u27eb{text[end:]}"
    return text, found.notes


@pytest.mark.parametrize(("empty", "opened"), [GLM, NEMOTRON, DEEPSEEK])
def test_a_block_that_the_template_closes_is_no_part_of_the_turn(empty, opened):
    turns = [QUESTION, assistant("a1"), QUESTION, assistant("a2")]
    shown = f"<|start|>user\nq<|end|><|start|>assistant\n{empty}"
    assert marked(with_think_blocks(empty, opened), *turns) == (
        f"{shown}\u27eaa1<|end|>\u27eb{shown}\u27eaa2<|end|>\u27eb",
        (UNPROMPTED,),
    )


@pytest.mark.parametrize(("empty", "opened"), [GLM, NEMOTRON])
def test_with_thinking_off_the_same_turns_answer_the_prompt(empty, opened):
    turns = [QUESTION, assistant("a1"), QUESTION, assistant("a2")]
    _, notes = marked(with_think_blocks(empty, opened), *turns, chat_template_kwargs={"enable_thinking": False})
    assert notes == ()


@pytest.mark.parametrize(("empty", "opened"), [GLM, NEMOTRON])
def test_a_turn_with_thinking_starts_behind_the_open_block(empty, opened):
    turns = [QUESTION, assistant("a1", reasoning_content="r1"), QUESTION, assistant("a2", reasoning_content="r2")]
    newline = "" if opened.endswith("n") else "\n"  # where the prompt has it not, the turn has
    prompt = opened.replace("\\n", "\n")
    assert marked(with_think_blocks(empty, opened), *turns) == (
        f"<|start|>user\nq<|end|><|start|>assistant\n{empty}\u27eaa1<|end|>\u27eb"
        f"<|start|>user\nq<|end|><|start|>assistant\n{prompt}\u27ea{newline}r2</think>a2<|end|>\u27eb",
        (UNPROMPTED, EARLIER_THINKING),
    )


def test_a_mark_behind_the_block_is_the_models():
    text, _ = marked(with_think_blocks(*COHERE), QUESTION, assistant("a"))
    assert text == "<|start|>user\nq<|end|><|start|>assistant\n\u27ea<s>a<|end|>\u27eb"


def test_a_template_that_opens_and_keeps_thinking():
    turns = [QUESTION, assistant("a1"), QUESTION, assistant("<think>\nr\n</think>a2")]
    start = "<|start|>user\nq<|end|>\n<|start|>assistant\n"
    assert marked(OPENS_AND_KEEPS_THINKING, *turns) == (
        f"{start}<think></think>\u27eaa1<|end|>\u27eb\n{start}<think>\n\u27ear\n</think>a2<|end|>\u27eb\n",
        (UNPROMPTED,),
    )


def test_thinking_behind_a_block_that_the_prompt_closes_is_refused_with_the_cure():
    template = with_think_blocks("", "<think></think>").replace(
        "'' if enable_thinking is false", "'<think>\\n' if enable_thinking"
    )
    turns = [QUESTION, assistant("a", reasoning_content="r")]
    problem = marked(template, *turns)
    assert problem.startswith("the tokens of turn 1 cannot be distinguished from the rest: ")
    assert "the turn contains thinking, and the generation prompt closes the think block; " in problem
    assert problem.endswith("; it works with data.chat_template_kwargs: {enable_thinking: true}")
    text, _ = marked(template, *turns, chat_template_kwargs={"enable_thinking": True})
    assert text.endswith("<|start|>assistant\n<think>\n\u27ear</think>a<|end|>\u27eb")


@pytest.mark.parametrize(("empty", "opened"), [("<think></think>", ""), ("<think>\\n\\n</think>\\n\\n", "<think>\\n")])
def test_thinking_in_a_content_gets_no_second_block(empty, opened):
    """As in Kimi-K2-Thinking and Qwen3.8, whose templates read thinking from a key alone."""
    template = with_think_blocks(empty, opened)
    of_key = marked(template, QUESTION, assistant("a", reasoning_content="r"))
    assert marked(template, QUESTION, assistant("<think>\nr\n</think>\n\na")) == of_key
    text, notes = marked(template, QUESTION, assistant("a"))
    assert ("<think>" in text, notes) == (True, (EMPTY_THINKING,))


def test_thinking_in_a_content_gets_the_marks_of_the_family():
    template = with_think_blocks("", "").replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    text, _ = marked(template, QUESTION, assistant("<think>\nr\n</think>\n\na"))
    assert text.endswith("assistant\n\u27ea[THINK]\nr[/THINK]a<|end|>\u27eb")


def test_thinking_that_is_left_out_of_turns_without_an_end_of_their_own():
    """As in GLM's: the mark of the next role, which ends a last turn too, is none of the template's."""
    template = with_think_blocks(*GLM).replace("{{- '<|end|>' }}", "")
    turns = [QUESTION, assistant("a1", reasoning_content="r1"), QUESTION, assistant("a2", reasoning_content="r2")]
    text, notes = marked(template, *turns, stops=("<|start|>",))
    assert notes == (UNPROMPTED, EARLIER_THINKING)
    assert text.endswith("<think>\u27ea\nr2</think>a2<|start|>\u27eb")

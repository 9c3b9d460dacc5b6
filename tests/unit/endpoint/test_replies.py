# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The text before the calls of a turn, which agents get as its content."""

import pytest

from nemo_rl_moe.data.thinking import Thinking
from nemo_rl_moe.endpoint.chat_requests import ChatRequest
from nemo_rl_moe.endpoint.replies import ReadTurn, read_turn, without_thinking
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS

REQUEST = ChatRequest((), reads_calls=True)
_THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
HARMONY_THINKING = Thinking("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>")
CALL = ToolCall("tool", {"argument": "value"})


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
@pytest.mark.parametrize("before", ["", "I call.\n\n", "<think>I could write it: EXAMPLE</think>\n\n", "1 < 2 {"])
def test_the_content_is_the_text_before_the_calls(name: str, before: str) -> None:
    tool_format = TOOL_FORMATS[name]
    if name == "llama3_json" and "{" in before:
        before = "1 < 2 "  # a brace that begins no JSON ends its calls
    before = before.replace("EXAMPLE", tool_format.example)
    turn = read_turn(f"{before}{tool_format.example} Done.", REQUEST, tool_format, begins_in_thinking=False)
    assert turn.calls == (CALL,)
    assert turn.content == before.rstrip()
    opened = before.removeprefix("<think>")
    if opened != before:
        turn = read_turn(f"{opened}{tool_format.example}", REQUEST, tool_format, begins_in_thinking=True)
        assert (turn.calls, turn.content) == ((CALL,), opened.rstrip())


def test_the_content_of_gpt_oss_ends_before_the_message_of_the_call() -> None:
    harmony = TOOL_FORMATS["harmony"]
    before = "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant"
    turn = read_turn(before + harmony.example, REQUEST, harmony, begins_in_thinking=False)
    assert (turn.calls, turn.content) == ((CALL,), before)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>final<|message|>3", "", "3"),
        ("<|channel|>analysis<|message|>hm", "hm", ""),
        (f"{_THOUGHT}<|channel|>commentary<|message|>I call.<|end|><|start|>assistant", "hm", "I call."),
        ("no channel", "", "no channel"),
    ],
)
def test_replies_of_gpt_oss_have_no_marks(text: str, reasoning: str, content: str) -> None:
    found = without_thinking(ReadTurn(text), HARMONY_THINKING, is_opened=False)
    assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "is_opened", "reasoning", "content"),
    [
        ("<think>hm</think>\n\n3", False, "hm", "3"),
        ("hm</think>3", True, "hm", "3"),
        ("hm", True, "hm", ""),
        (" I write <think>.", False, "", " I write <think>."),
    ],
)
def test_thinking_that_begins_a_turn_is_its_reasoning(text: str, is_opened: bool, reasoning: str, content: str) -> None:
    thinking = Thinking("<think>", "</think>", "</think>")
    found = without_thinking(ReadTurn(text), thinking, is_opened=is_opened)
    assert (found.reasoning, found.content) == (reasoning, content)
    wrong = ReadTurn(text, num_malformed=1)
    assert without_thinking(wrong, thinking, is_opened=is_opened) == wrong


def test_a_long_argument_full_of_marks_is_read_a_few_times_alone() -> None:
    hermes, times = TOOL_FORMATS["hermes"], 0

    def count_and_parse(text: str, schemas: Schemas) -> list[ParsedCall]:
        nonlocal times
        times += 1
        return hermes.parse(text, schemas)

    page = "<p><b>x</b></p>" * 2_000
    text = f'I write.\n<tool_call>{{"name": "write", "arguments": {{"text": "{page}"}}}}</tool_call>'
    turn = read_turn(text, REQUEST, ToolFormat(count_and_parse, hermes.example), begins_in_thinking=False)
    assert (turn.content, turn.calls) == ("I write.", (ToolCall("write", {"text": page}),))
    assert times < 30

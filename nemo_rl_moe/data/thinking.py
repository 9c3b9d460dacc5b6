# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks around the thinking of a model."""

import re
from dataclasses import dataclass, replace

THINK_START, THINK_END = "<think>", "</think>"
"""Marks that most models and data use. Tool calls are only read outside of these marks."""
_CHANNEL = "<|channel|>"
_CHANNEL_MESSAGE = re.compile(
    r"<\|channel\|>(\w+)(?:(?!<\|(?:message|start|channel)\|>).)*<\|message\|>"
    r"(.*?)(?:<\|(?:end|return|call)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
"""A message of gpt-oss: its channel and text."""


@dataclass(frozen=True)
class Thinking:
    """Marks around a model's thinking: `start` and `end`.

    Attributes:
        before_answer: Text between thinking and answer.
        is_opened: Whether the generation prompt ends with `start`, so that a response begins within thinking.
    """

    start: str
    end: str
    before_answer: str
    is_opened: bool = False

    def split(self, turn: str, *, is_opened: bool) -> tuple[str, str]:
        """Split a turn of the model into its thinking and its answer. Thinking that does not end has no answer.

        Args:
            is_opened: Whether the prompt of the turn ends with `start`.
        """
        if is_opened:
            turn = self.start + turn
        if self.start.startswith(_CHANNEL):
            return _split_channels(turn)
        before, found, rest = turn.partition(self.start)
        if not found or before.strip():
            return "", turn
        thinking, _, answer = rest.partition(self.end)
        return thinking.strip(), answer.strip()

    def __str__(self) -> str:
        opened = ", opened by the generation prompt" if self.is_opened else ""
        return f"{self.start!r} to {self.end!r}{opened}"


_MARKS = (
    Thinking(THINK_START, THINK_END, THINK_END),
    Thinking("[THINK]", "[/THINK]", "[/THINK]"),
    Thinking("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>"),
    Thinking("<seed:think>", "</seed:think>", "</seed:think>"),
    Thinking("<|channel>thought", "<channel|>", "<channel|>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>"),
)


def _split_channels(turn: str) -> tuple[str, str]:
    messages = _CHANNEL_MESSAGE.findall(turn)
    thinking = "\n\n".join(text.strip() for channel, text in messages if channel == "analysis")
    answer = "\n\n".join(text.strip() for channel, text in messages if channel != "analysis")
    return (thinking, answer) if messages else ("", turn)


def find_thinking(before: str, behind: str, generation_prompt: str, template: str) -> Thinking | None:
    """Return the marks that a chat template writes around thinking, or None if it writes none of the known marks.

    Args:
        before: Text before a turn's thinking in a rendering. Empty if the template shows no thinking.
        behind: Text after a turn's thinking in the same rendering.
        generation_prompt: Text that the template puts before a turn of the model.
        template: Source of the template. If the template drops thinking, its source may still have the end mark, to
            find thinking and remove it, as in DeepSeek's templates, or the mark of the answer, as in gpt-oss.
    """
    opening = generation_prompt.rstrip()
    for marks in _MARKS:
        is_opened = opening.endswith(marks.start)
        if is_opened or (before.rstrip().endswith(marks.start) and behind.lstrip().startswith(marks.end)):
            return replace(marks, is_opened=is_opened)
    ends = ("</", _CHANNEL)
    return next(
        (each for each in _MARKS if each.before_answer.startswith(ends) and each.before_answer in template), None
    )

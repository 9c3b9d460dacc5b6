# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks around the thinking of a model."""

from dataclasses import dataclass, replace

THINK_START, THINK_END = "<think>", "</think>"
"""Marks that most models and data use. Tool calls are only read outside of these marks."""


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


def find_thinking(before: str, behind: str, generation_prompt: str, template: str) -> Thinking | None:
    """Return the marks that a chat template writes around thinking, or None if it writes none of the known marks.

    Args:
        before: Text before a turn's thinking in a rendering. Empty if the template shows no thinking.
        behind: Text after a turn's thinking in the same rendering.
        generation_prompt: Text that the template puts before a turn of the model.
        template: Source of the template. If the template drops thinking, its source may still have the end mark, to
            find thinking and remove it, as in DeepSeek's templates.
    """
    opening = generation_prompt.rstrip()
    for marks in _MARKS:
        is_opened = opening.endswith(marks.start)
        if is_opened or (before.rstrip().endswith(marks.start) and behind.lstrip().startswith(marks.end)):
            return replace(marks, is_opened=is_opened)
    return next((marks for marks in _MARKS if marks.end.startswith("</") and marks.end in template), None)

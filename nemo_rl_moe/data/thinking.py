# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks around the thinking of a model."""

from dataclasses import dataclass, replace

THINK_START, THINK_END = "<think>", "</think>"
"""Marks of most models, and of data. Tool calls are read only outside of them."""


@dataclass(frozen=True)
class Thinking:
    """Marks around thinking.

    Attributes:
        before_answer: Text between thinking and answer.
        is_opened: The generation prompt ends with the opening mark, so that a response begins within thinking.
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
    """Find the marks that a chat template writes around thinking.

    Args:
        before: Text before the thinking of a turn in a rendering, empty if the template shows no thinking.
        behind: Text after it.
        generation_prompt: Text that the template puts before a turn of the model.
        template: A template that drops thinking may still look for its end, as DeepSeek's do.
    """
    opening = generation_prompt.rstrip()
    for marks in _MARKS:
        is_opened = opening.endswith(marks.start)
        if is_opened or (before.rstrip().endswith(marks.start) and behind.lstrip().startswith(marks.end)):
            return replace(marks, is_opened=is_opened)
    return next((marks for marks in _MARKS if marks.end.startswith("</") and marks.end in template), None)

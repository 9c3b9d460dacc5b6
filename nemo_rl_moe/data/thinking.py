# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks around the thinking of a model."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thinking:
    """Marks around thinking.

    Attributes:
        is_opened: The generation prompt ends with the opening mark, so that a response begins within thinking.
    """

    start: str
    end: str
    is_opened: bool = False

    def __str__(self) -> str:
        opened = ", opened by the generation prompt" if self.is_opened else ""
        return f"{self.start!r} to {self.end!r}{opened}"


_MARKS: Sequence[tuple[str, str]] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def find_thinking(before: str, behind: str, generation_prompt: str, template: str) -> Thinking | None:
    """Find the marks that a chat template writes around thinking.

    Args:
        before: Text before the thinking of a turn in a rendering; empty: the template shows none.
        behind: Text behind it.
        generation_prompt: Text that the template puts before a turn of the model.
        template: The template. One that drops thinking may still look for its end, as DeepSeek's do.
    """
    opening = generation_prompt.rstrip()
    for start, end in _MARKS:
        is_opened = opening.endswith(start)
        if is_opened or (before.rstrip().endswith(start) and behind.lstrip().startswith(end)):
            return Thinking(start, end, is_opened)
    return next((Thinking(start, end) for start, end in _MARKS if end.startswith("</") and end in template), None)

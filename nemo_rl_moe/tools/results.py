# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of calls, as texts for the model."""

import json
from dataclasses import dataclass, field

from nemo_rl_moe.rewards.interface import Fault


@dataclass(frozen=True)
class ToolResult:
    """Answer to a call.

    Attributes:
        text: For the model.
        fault: Why the tool gave no result; None: it gave one.
        is_cut: The text was too long, and its end says so.
        seconds: How long the call took.
    """

    text: str
    fault: Fault | None = None
    is_cut: bool = False
    seconds: float = field(default=0.0, compare=False)


def error_text(problem: str) -> str:
    """Return the answer to a call that has no result."""
    return as_text(f"error: {problem}")  # it may quote what the model wrote


def as_text(value: object) -> str:
    """Return what a tool has returned as a text: JSON, unless it is one."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()  # half of a pair of surrogates has no tokens


def cut(text: str, most_characters: int) -> tuple[str, bool]:
    """Return the beginning of a text with a note on what is missing, and whether anything is."""
    if len(text) <= most_characters:
        return text, False
    return f"{text[:most_characters]}\n[cut: the first {most_characters:,} of {len(text):,} characters]", True

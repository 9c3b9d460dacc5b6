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
    """Return what a tool has returned as a text: JSON, unless it is one.

    Raises:
        TypeError: JSON cannot write it.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_as_words)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"what the tool returned is no text, and JSON cannot write it: {error}") from error
    return text.encode("utf-8", "replace").decode()  # half of a pair of surrogates has no tokens


def _as_words(value: object) -> str:
    """Return a value that JSON does not know as a text, such as a date."""
    text = str(value)
    if f"{id(value):#x}" in text:  # an address is no answer, and differs from run to run
        raise TypeError(f"there is a value of type {type(value).__name__}")
    return text


def cut(text: str, most_characters: int) -> tuple[str, bool]:
    """Return the beginning of a text with a note on what is missing, and whether anything is."""
    if len(text) <= most_characters:
        return text, False
    return f"{text[:most_characters]}\n[cut: the first {most_characters:,} of {len(text):,} characters]", True

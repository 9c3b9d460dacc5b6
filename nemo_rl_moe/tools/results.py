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
        fault: Reason for a missing result, or None.
        is_cut: The text was too long, and ends with a note on that.
        seconds: Duration of the call.
    """

    text: str
    fault: Fault | None = None
    is_cut: bool = False
    seconds: float = field(default=0.0, compare=False)


def error_text(problem: str) -> str:
    """Return the answer to a call that has no result."""
    return as_text(f"error: {problem}")  # the problem may quote characters that have no tokens


def as_text(value: object) -> str:
    """Return a tool's result if it is a text, else its JSON.

    Raises:
        TypeError: JSON cannot write it.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_as_words)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"what the tool returned is no text, and JSON cannot write it: {error}") from error
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair has no tokens


def _as_words(value: object) -> str:
    """Return the text of a value that JSON lacks, such as a date."""
    text = str(value)
    if f"{id(value):#x}" in text:  # a memory address, which differs from run to run
        raise TypeError(f"there is a value of type {type(value).__name__}")
    return text


def cut(text: str, most_characters: int) -> tuple[str, bool]:
    """Return the beginning of a text with a note on the missing part, and whether the text was cut."""
    if len(text) <= most_characters:
        return text, False
    return f"{text[:most_characters]}\n[cut: the first {most_characters:,} of {len(text):,} characters]", True

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of tool calls, as texts for the model."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from nemo_rl_moe.rewards.interface import Fault


@dataclass(frozen=True)
class ToolResult:
    """The answer to a call.

    Attributes:
        text: Text for the model: the result, or an error.
        fault: Reason why there is no result. None: there is one.
        is_cut: Whether the result was too long. The text then ends with a note on this.
        is_wrong: Whether the arguments were refused in the process of the tool. The text is the reason.
        seconds: Duration of the call, in seconds.
    """

    text: str
    fault: Fault | None = None
    is_cut: bool = False
    is_wrong: bool = False
    seconds: float = field(default=0.0, compare=False)


CallTool = Callable[[str, Mapping[str, object], float], Awaitable[ToolResult]]
"""Calls a tool by its name, checked arguments and a limit in seconds."""


def error_text(problem: str) -> str:
    """Return the text for the model about a call that has no result."""
    return as_text(f"error: {problem}")  # the problem may quote characters that have no tokens


def as_text(value: object) -> str:
    """Return a tool's result if it is a text, else its JSON.

    Raises:
        TypeError: JSON cannot represent the result.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_as_words)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the result of the tool is neither a text nor a JSON value: {error}") from error
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair has no tokens


def _as_words(value: object) -> str:
    """Return a text for a value that JSON does not have, such as a date."""
    text = str(value)
    if f"{id(value):#x}" in text:  # the text has a memory address, which differs in each run
        raise TypeError(f"there is a value of type {type(value).__name__}")
    return text


def cut(text: str, most_characters: int) -> tuple[str, bool]:
    """Return a text, and whether it was cut. Of a text with more than `most_characters`, return the beginning and a
    note on the missing part."""
    if len(text) <= most_characters:
        return text, False
    return f"{text[:most_characters]}\n[cut: the first {most_characters:,} of {len(text):,} characters]", True

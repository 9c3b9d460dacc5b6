# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations of each kind, with words that show in a rendering where each part of them went."""

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "a place"},
                "days": {"type": "integer", "description": "days ahead"},
            },
            "required": ["city"],
        },
    },
}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(number: int, city: str) -> dict[str, Any]:
    """Return a call; its number is the value of an argument, too."""
    function = {"name": "get_weather", "arguments": {"city": city, "days": number}}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "get_weather", "content": text}


CHAT, THINKING, CALL, CALLS = "chat", "thinking", "one call", "two calls"
KINDS = (CHAT, THINKING, CALL, CALLS)

CONVERSATIONS: Mapping[str, Sequence[Message]] = {
    CHAT: [system("SYS0"), user("USR1"), assistant("ANS1 x"), user("USR2"), assistant("ANS2 y")],
    THINKING: [
        user("USR1"),
        assistant("ANS1", reasoning_content="THK1"),
        user("USR2"),
        assistant("ANS2", reasoning_content="THK2"),
    ],
    CALL: [user("USR1"), assistant("", tool_calls=[call(1, "ARGa")]), result(1, "RES1"), assistant("ANS1 z")],
    CALLS: [
        user("USR1"),
        assistant("PRE1", tool_calls=[call(1, "ARGa"), call(2, "ARGb")]),
        result(1, "RES1"),
        result(2, "RES2"),
        assistant("ANS1 z"),
    ],
}


def record(kind: str) -> dict[str, Any]:
    """Return the record of a conversation, with the definition of its tool."""
    found: dict[str, Any] = {"messages": list(CONVERSATIONS[kind])}
    return {**found, "tools": [TOOL]} if kind in (CALL, CALLS) else found

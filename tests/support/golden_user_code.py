# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""User code of the golden runs: a reward, a rollout function, an agent, a tool and a format of calls.

A run of another version of the package imports a copy of this file.
"""

import json
import urllib.request
from typing import Any


def share_of_digits(item: Any) -> float:
    """Return the part of a response that is digits, of eight."""
    return sum(character.isdigit() for character in item.response) / 8


def has_an_even_digit(item: Any) -> float:
    """Return 1 for a response with an even digit: many groups agree."""
    return float(any(character in "02468" for character in item.response))


def has_an_even_sum(item: Any) -> float:
    """Return 1 for every other response: few groups agree."""
    return float(sum(map(ord, item.response)) % 2 == 0)


async def ask_twice(session: Any) -> Any:
    """Ask a second question that repeats the first answer's first digit."""
    from nemo_rl_moe.rewards.interface import Score

    first = await session.generate()
    digit = next((character for character in first.text if character.isdigit()), "0")
    session.append_text(f"{digit}+1=")
    second = await session.generate()
    digits = sum(character.isdigit() for character in first.text + second.text)
    return session.finish(Score(digits / 16, is_correct=digits > 4), {"env/num_digits": float(digits)})


def agent(task: Any) -> float:
    """Ask a second question about the first answer; return the share of letters in both."""
    messages = list(task.messages)
    for question in (None, "12+3="):
        if question is not None:
            messages.append({"role": "user", "content": question})
        body = {"model": task.model, "messages": messages, "max_tokens": 8}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {task.api_key}"}
        request = urllib.request.Request(f"{task.base_url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as reply:
            messages.append(json.load(reply)["choices"][0]["message"])
    texts = [message["content"] or "" for message in messages if message["role"] == "assistant"]
    return sum(character.isalpha() for text in texts for character in text) / 16


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def calls_of_any_text(text: str, schemas: Any) -> list[Any]:
    """Return a call for every other text: an untrained model writes none."""
    from nemo_rl_moe.tools.formats.interface import ToolCall

    size = len(text.encode())
    return [ToolCall("add", {"a": size, "b": 2})] if size % 2 else []


def __getattr__(name: str) -> Any:
    if name != "ANY_TEXT":
        raise AttributeError(name)
    from nemo_rl_moe.tools.formats.interface import ToolFormat
    from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS

    return ToolFormat(calls_of_any_text, TOOL_FORMATS["hermes"].example)

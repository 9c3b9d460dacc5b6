# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The tool, the format and the agent of drills: a call takes a moment, and its process says that it is under way."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS
from tests.support.agents_of_tests import openai

NOTES = "DRILL_CALLERS"
"""Environment variable with the folder in which each process that calls leaves its id, and a text while it does."""
CALLING = "calling"
SECONDS_A_CALL = 0.1
MOST_CHARACTERS = 20


def _note(text: str) -> None:
    if NOTES in os.environ:
        Path(os.environ[NOTES], str(os.getpid())).write_text(text)


_note("")


@contextmanager
def _calling() -> Iterator[None]:
    _note(CALLING)
    try:
        time.sleep(SECONDS_A_CALL)
        yield
    finally:
        _note("")


def turn_around(text: str) -> str:
    """Turn a text around.

    Args:
        text: The text.
    """
    with _calling():
        return text[::-1]


def read_calls(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Return a call for any text: an untrained model writes none."""
    return [ToolCall("turn_around", {"text": "".join(filter(str.isalnum, text))[:MOST_CHARACTERS]})]


ANY_TEXT = ToolFormat(read_calls, TOOL_FORMATS["hermes"].example)


def asks_twice(task: AgentTask) -> None:
    """Ask, turn the answer around, and ask about that; the reward function scores."""
    client = openai().OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    for _ in range(2):
        answer = client.chat.completions.create(model=task.model, messages=messages).choices[0].message
        with _calling():
            turned = "".join(filter(str.isalnum, answer.content or ""))[MOST_CHARACTERS::-1]
        messages += [answer.to_dict(), {"role": "user", "content": f"{turned}+1="}]

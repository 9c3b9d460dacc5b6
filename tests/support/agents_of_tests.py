# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Agents of tests and of drills: by what their task says they answer, raise, hang, die, or leave a child."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_rl_moe.rollouts.agents.task import AgentResult, AgentTask
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS

MARK = "left-by-an-agent"
"""In the command line of every child that an agent leaves."""


def openai() -> ModuleType:
    """Import the client when an agent runs: in a process that has it, W&B writes a hint to the error output."""
    return import_module("openai")


def agent(task: AgentTask) -> Any:
    """Do what the record says: `ask`, `raise`, `exit`, `array`, `die`, `hang`, `child`, or `hang_apart`.

    The child of the last is in a session of its own.
    """
    what = task.record["what"]
    if what == "none":
        return None
    client = openai().OpenAI()  # the variables of the environment say where
    reply = client.chat.completions.create(model=task.model, messages=list(task.messages))
    print("the model said", reply.choices[0].message.content, flush=True)
    if what == "raise":
        raise ValueError("asked to raise")
    if what == "exit":
        sys.exit(3)
    if what == "array":  # in place of the answer of its process
        for each in gc.get_objects():
            if isinstance(each, Connection):
                each.send_bytes(b"[1]")
    if what == "die":
        os.abort()
    if what == "environment":
        return float(any("A_SECRET_TOKEN" in name for name in os.environ))
    if what in ("hang", "hang_apart", "child"):
        child = [sys.executable, "-c", "import time; time.sleep(1000)", MARK]
        subprocess.Popen(child, start_new_session=what == "hang_apart")
        if what != "child":
            time.sleep(1000)
    return len(reply.choices[0].message.content) / 10


async def asks_twice(task: AgentTask) -> dict[str, float]:
    """Ask a second question about the first answer, as a coroutine; the reward is the share of digits."""
    client = openai().AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [*task.messages]
    first = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=8)
    messages += [first.choices[0].message, {"role": "user", "content": "12+3="}]
    second = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=8)
    texts = [each.choices[0].message.content or "" for each in (first, second)]
    digits = sum(character.isdigit() for text in texts for character in text)
    return {"digits": digits / 16, "short": 1.0 - len(texts[1]) / 100}


async def asks_at_once(task: AgentTask) -> AgentResult:
    """Continue a first answer in three ways at the same time. Each of them is rewarded for its digits."""
    client = openai().AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    first = await client.chat.completions.create(model=task.model, messages=list(task.messages), max_tokens=8)
    said = [*task.messages, first.choices[0].message]
    replies = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=task.model, messages=[*said, {"role": "user", "content": question}], max_tokens=8
            )
            for question in ("1+2=", "3+4=", "5+6=")
        )
    )
    shares = {
        reply.id: sum(character.isdigit() for character in reply.choices[0].message.content or "") / 8
        for reply in replies
    }
    return AgentResult(0.0, turn_rewards=shares)


MET: list[str] = []


async def meets_others(task: AgentTask) -> float:
    """Return the process, once three agents are in it; or `wait` or `block` for ever, or `raise`."""
    what = task.record["what"]
    if what == "raise":
        raise ValueError("asked to raise")
    if what == "block":
        time.sleep(1000)
    if what == "wait":
        await asyncio.sleep(1000)
    MET.append(task.sample_id)
    while len(MET) < 3:
        await asyncio.sleep(0.01)
    return float(os.getpid())


def asks_over_http(task: AgentTask) -> float:
    """Ask twice, without a client's library, which takes seconds to import."""
    messages: list[Any] = [*task.messages]
    for question in ("again?", "and again?"):
        body = json.dumps({"model": task.model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            messages += [json.load(reply)["choices"][0]["message"], {"role": "user", "content": question}]
    return 1.0


def hangs_at_times(task: AgentTask) -> float:
    """Ask once; where the answer has a length that four divides, leave a child and hang."""
    client = openai().OpenAI(base_url=task.base_url, api_key=task.api_key)
    text = client.chat.completions.create(model=task.model, messages=list(task.messages)).choices[0].message.content
    if len(text) % 4 == 0:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", MARK])
        time.sleep(1000)
    return len(text) / 10


def hangs_with_a_child(task: AgentTask) -> float:
    """Ask once, leave a child, and hang."""
    client = openai().OpenAI(base_url=task.base_url, api_key=task.api_key)
    client.chat.completions.create(model=task.model, messages=list(task.messages))
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", MARK])
    time.sleep(1000)
    return 0.0


def asks_many_times(task: AgentTask) -> float:
    """Ask four questions in one conversation; the reward is the share of digits in the answers."""
    client = openai().OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [*task.messages]
    texts = []
    for number in range(4):
        answer = client.chat.completions.create(model=task.model, messages=messages, max_tokens=8).choices[0].message
        texts.append(answer.content or "")
        messages += [answer.to_dict(), {"role": "user", "content": f"{number}+1="}]
    return sum(character.isdigit() for text in texts for character in text) / 32


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


def asks_about_its_answer(task: AgentTask) -> None:
    """Ask, turn the answer around, and ask about that; the reward function scores."""
    client = openai().OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = list(task.messages)
    for _ in range(2):
        answer = client.chat.completions.create(model=task.model, messages=messages).choices[0].message
        with _calling():
            turned = "".join(filter(str.isalnum, answer.content or ""))[MOST_CHARACTERS::-1]
        messages += [answer.to_dict(), {"role": "user", "content": f"{turned}+1="}]

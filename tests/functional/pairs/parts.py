# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of the cases: a reward, a function of two turns, one of two sequences, a tool's format, and an agent."""

import asyncio
import json
import time
import urllib.request
from typing import Any

from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.tools.formats.interface import ParsedCall, Schemas, ToolCall, ToolFormat
from nemo_rl_moe.tools.formats.registry import TOOL_FORMATS

NUM_REWARDS = 8
SLOW_S = 1.0


def grade(item: ScoringItem) -> float:
    """Return a reward between 0 and 1 that depends on all characters of the response: those of a group differ."""
    return _reward(item.response)


def _seconds_of(sample_id: str) -> float:
    """Return what every third prompt takes longer: its group is under way while steps are trained, and gets old."""
    return SLOW_S if int(sample_id.rpartition(":")[2]) % 3 == 0 else 0.0


def _reward(text: str) -> float:
    return sum(map(ord, text)) % NUM_REWARDS / (NUM_REWARDS - 1)


async def ask_twice(session: Session) -> Trajectory:
    """Ask, append a text of the environment to the answer, and ask again."""
    first = await session.generate()
    session.append_text("12+3=")
    await asyncio.sleep(_seconds_of(session.prompt.sample_id))
    second = await session.generate()
    return session.finish(Score(_reward(first.text + second.text), is_correct=False))


async def ask_anew(session: Session) -> Trajectory:
    """Ask, and ask once more in a conversation of its own."""
    first = await session.generate()
    session.begin_conversation([{"role": "user", "content": "in short: 12+3="}])
    await asyncio.sleep(_seconds_of(session.prompt.sample_id))
    second = await session.generate()
    return session.finish(Score(_reward(first.text + second.text), is_correct=False))


def read_calls(text: str, schemas: Schemas) -> list[ParsedCall]:
    """Return a call for any text: an untrained model writes none."""
    return [ToolCall("add", {"a": len(text), "b": 2})]


ANY_TEXT = ToolFormat(read_calls, TOOL_FORMATS["hermes"].example)


def agent(task: AgentTask) -> None:
    """Ask twice by HTTP; the reward function scores."""
    messages: list[Any] = [*task.messages]
    time.sleep(_seconds_of(task.sample_id))
    for _ in range(2):
        body = json.dumps({"model": task.model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            messages += [json.load(reply)["choices"][0]["message"], {"role": "user", "content": "12+3="}]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An agent with a tool, by the `openai` client: the model may call an adder before it answers."""

import json
from typing import Any

from openai import AsyncOpenAI

from nemo_rl_moe.rollouts.agents.task import AgentTask

MOST_CALLS = 3
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
            "required": ["numbers"],
        },
    },
}


def add(arguments: str) -> str:
    """Return the sum, or the error of a call."""
    try:
        return str(sum(json.loads(arguments)["numbers"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


async def solve(task: AgentTask) -> float:
    """Return 1 for the right answer, else up to 0.1 for the share of digits, as a slope for an untrained model."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [{"role": "system", "content": "Answer by a number."}, *task.messages]
    for _ in range(MOST_CALLS):
        reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[ADD])
        answer = reply.choices[0].message
        messages.append(answer.to_dict())
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            assert call.type == "function"
            result = add(call.function.arguments) if call.function.name == "add" else "error: there is no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    text = answer.content or ""
    if text.strip() == str(task.record["answer"]):
        return 1.0
    return sum(character.isdigit() for character in text) / max(len(text), 1) / 10

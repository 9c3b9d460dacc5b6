# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of the verifiers library for its tests: sums in one turn, with a tool, and asked again."""

import time
from typing import Any

import verifiers as vf
from datasets import Dataset

SUMS = [(3, 4), (10, 5), (2, 2), (20, 1), (7, 7), (1, 8), (30, 12), (6, 5)]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def right(completion: Any, answer: str) -> float:
    return float(str(completion[-1]["content"]).strip().endswith(answer))


def digits(completion: Any) -> float:
    """Return how many of the characters are digits."""
    text = str(completion[-1]["content"])
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def fails(completion: Any) -> float:
    raise ValueError("no score")


def hangs(completion: Any) -> float:
    """Keep the thread."""
    time.sleep(3600)
    return 0.0


def compares(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


class AsksAgain(vf.MultiTurnEnv):
    """Asks whether that is so, and sends a history of its own the second time."""

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        if len(state["trajectory"]) == 1:
            return [{"role": "user", "content": "Are you sure?"}]
        raise vf.ToolCallError("the server is gone")

    async def get_prompt_messages(self, state: Any) -> Any:
        """Forget what was said before the third response."""
        if len(state["trajectory"]) == 2:
            return [{"role": "user", "content": "Say it once more."}]
        return await super().get_prompt_messages(state)


def load_environment(kind: str = "single", max_turns: int = 3, reward: str = "right") -> vf.Environment:
    rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in SUMS]
    functions = {"right": right, "digits": digits, "fails": fails, "hangs": hangs, "compares": compares}
    if reward not in functions:
        raise ValueError(f"no reward {reward}")
    rubric = vf.Rubric(funcs=[functions[reward]])
    data = {"dataset": Dataset.from_list(rows[:6]), "eval_dataset": Dataset.from_list(rows[6:]), "rubric": rubric}
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=max_turns, **data)
    if kind == "again":
        return AsksAgain(max_turns=max_turns, **data)
    return vf.SingleTurnEnv(system_prompt="Add.", **data)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers.v1 for its tests: sums in one turn, with a tool, or asked again."""

import asyncio
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf

SUMS = [(3, 4), (10, 5), (2, 2), (20, 1), (7, 7), (1, 8), (30, 12), (6, 5)]


class SumData(vf.TaskData):
    answer: str
    wants: str = "digits"


class Adder(vf.Toolset[vf.ToolsetConfig]):
    """A server with a tool."""

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumConfig(vf.TaskConfig):
    with_tool: bool = False


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    """Scores by digits, or in a way that fails."""

    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        """Serve the tool where it is wanted."""
        return [Adder(vf.ToolsetConfig())] if config.with_tool else []

    @vf.reward(weight=2.0)
    async def digits(self, trace: vf.Trace) -> float:
        """Return how many of the characters of all replies are digits; or raise, or hang."""
        if self.data.wants == "raises" and self.data.answer == "7":
            raise ValueError("no score for seven")
        if self.data.wants == "hangs" and self.data.answer == "7":
            await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
            await asyncio.sleep(1000)
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(character.isdigit() for character in text) / max(len(text), 1)


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    split: Literal["train", "test"] = "train"
    wants: str = "digits"
    asks_again: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Six sums to train on, and two to test with."""

    def load(self) -> Iterator[SumTask]:
        for a, b in SUMS[:6] if self.config.split == "train" else SUMS[6:]:
            data = SumData(prompt=f"{a}+{b}=?", system_prompt="Add.", answer=str(a + b), wants=self.config.wants)
            yield SumTask(data, self.config.task)


class AskingEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Asks whether that is so."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        if not self.config.taskset.asks_again:
            await agents.agent.run(task)
            return
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("Are you sure?")


__all__ = ["AskingEnv", "Sums"]

if __name__ == "__main__":
    Adder.run()

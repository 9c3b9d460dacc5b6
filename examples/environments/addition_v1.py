# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Additions as a taskset of `verifiers.v1`: the name addition-v1."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf


class Addition(vf.TaskData):
    """One addition."""

    answer: str


class AdditionTask(vf.Task[Addition, vf.State]):
    """Scores the last reply."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the text after any working is the sum."""
        reply = trace.assistant_messages[-1].content or ""
        return float(reply.rpartition("</think>")[2].strip() == self.data.answer)


class AdditionsConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    num_digits: int = 2
    num_prompts: int = 2000
    seed: int = 0


class Additions(vf.Taskset[AdditionTask, AdditionsConfig]):
    """Different random additions."""

    def load(self) -> Iterator[AdditionTask]:
        """Yield the additions."""
        draw, most = random.Random(self.config.seed), 10**self.config.num_digits
        pairs = {(draw.randrange(most), draw.randrange(most)): None for _ in range(self.config.num_prompts)}
        for a, b in pairs:
            yield AdditionTask(Addition(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


__all__ = ["Additions"]

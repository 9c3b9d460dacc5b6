# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine without trajectories."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest
from nemo_rl_moe.generation.lockstep import LockstepEngine


def generate_all(
    engine: GenerationEngine, requests: Sequence[GenerationRequest]
) -> Iterator[tuple[int, GeneratedSequence]]:
    """Generate outside of an event loop; yield the index of each request and its sequence, as they finish."""
    loop = asyncio.new_event_loop()
    tasks = {loop.create_task(engine.generate(request)): index for index, request in enumerate(requests)}
    try:
        loop.run_until_complete(asyncio.sleep(0))  # every task has asked
        answers = engine.answer_all() if isinstance(engine, LockstepEngine) else iter(())
        while tasks:
            next(answers, None)
            done, _ = loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            for task in sorted(done, key=lambda ended: tasks[ended]):
                yield tasks.pop(task), task.result()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(_ended([*left, *tasks]))
        loop.close()


async def _ended(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)

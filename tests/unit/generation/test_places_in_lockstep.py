# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A batch of lockstep does not depend on which task has asked first."""

import asyncio
from collections.abc import Iterator, Sequence
from contextvars import copy_context

import pytest

from nemo_rl_moe.generation.lockstep import PLACE, Lockstep


@pytest.mark.parametrize("delays", [(0, 1, 2, 3), (3, 1, 2, 0), (2, 3, 0, 1)])
@pytest.mark.parametrize("most_at_a_time", [None, 3])
def test_requests_stand_in_the_order_of_their_places(delays: Sequence[int], most_at_a_time: int | None) -> None:
    batches: list[list[str]] = []

    def answers(requests: Sequence[str]) -> Iterator[tuple[int, str]]:
        batches.append(list(requests))
        yield from enumerate(f"{request}!" for request in requests)

    async def ask(pool: Lockstep[str, str], delay: int, request: str) -> str:
        for _ in range(delay):
            await asyncio.sleep(0)
        return await asyncio.create_task(pool.ask(request))  # a task within a task has its place

    async def run() -> list[str]:
        pool = Lockstep(answers)
        pool.most_at_a_time = most_at_a_time
        tasks = []
        for place, delay in enumerate(delays):
            context = copy_context()
            context.run(PLACE.set, place)
            tasks.append(asyncio.get_running_loop().create_task(ask(pool, delay, str(place)), context=context))
        for _ in range(10):
            await asyncio.sleep(0)
        list(pool.answer_all())
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == ["0!", "1!", "2!", "3!"]
    assert batches == ([["0", "1", "2", "3"]] if most_at_a_time is None else [["0", "1", "2"], ["3"]])

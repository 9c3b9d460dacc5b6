# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests on their way to copies of the weights: what shares a batch, who waits, and what an error or a pause does."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.megatron_separate.batches import RequestBatches

SAMPLED, GREEDY = SamplingParameters(4), SamplingParameters(4, temperature=0.0)
BROKEN = 13
"""A batch with this seed fails."""


@dataclass
class Copies:
    """Copies of a model that answers with the seed of a request; one waits where its gate is closed.

    Attributes:
        batches: Copy and seeds of each batch, in the order in which they began.
    """

    gates: dict[int, Event] = field(default_factory=dict)
    batches: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def generate(self, copy: int, batch: GenerationBatch) -> list[GeneratedSequence]:
        self.batches.append((copy, batch.seeds))
        if copy in self.gates:
            assert self.gates[copy].wait(60)
        if BROKEN in batch.seeds:
            raise ValueError("a broken batch")
        return [GeneratedSequence(np.array([seed]), np.zeros(1, np.float32), False, 0) for seed in batch.seeds]


def request(seed: int, sampling: SamplingParameters = SAMPLED) -> GenerationRequest:
    return GenerationRequest((1, 2), seed, sampling)


async def seed_of(batches: RequestBatches, asked: GenerationRequest) -> int:
    return int((await batches.answer(asked)).token_ids[0])


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_requests_of_one_turn_are_dealt_out_to_the_free_copies_by_their_sampling() -> None:
    copies = Copies()
    batches = RequestBatches(copies.generate, 2, None)

    async def main() -> list[int]:
        asked = [request(seed) for seed in range(4)] + [request(9, GREEDY)]
        return await asyncio.gather(*(seed_of(batches, each) for each in asked))

    assert run(main()) == [0, 1, 2, 3, 9]
    assert sorted(copies.batches[:2]) == [(0, (0, 2)), (1, (1, 3))]
    assert [seeds for _, seeds in copies.batches[2:]] == [(9,)]
    assert run(main()) == [0, 1, 2, 3, 9], "another event loop"


def test_a_free_copy_takes_what_waits_up_to_its_limit() -> None:
    copies = Copies(gates={0: Event()})
    batches = RequestBatches(copies.generate, 1, 2)

    async def main() -> list[int]:
        first = asyncio.create_task(seed_of(batches, request(0)))
        await until(lambda: bool(copies.batches))
        later = [asyncio.create_task(seed_of(batches, request(seed))) for seed in (1, 2, 3)]
        await asyncio.sleep(0)
        copies.gates[0].set()
        return await asyncio.gather(first, *later)

    assert run(main()) == [0, 1, 2, 3]
    assert copies.batches == [(0, (0,)), (0, (1, 2)), (0, (3,))]


def test_nobody_generates_for_a_task_that_was_cancelled() -> None:
    copies = Copies(gates={0: Event()})
    batches = RequestBatches(copies.generate, 1, None)

    async def main() -> list[int]:
        first = asyncio.create_task(seed_of(batches, request(0)))
        await until(lambda: bool(copies.batches))
        given_up, kept = (asyncio.create_task(seed_of(batches, request(seed))) for seed in (1, 2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.sleep(0)
        copies.gates[0].set()
        return await asyncio.gather(first, kept)

    assert run(main()) == [0, 2]
    assert copies.batches == [(0, (0,)), (0, (2,))]


def test_a_copy_is_free_again_when_its_batch_ends_after_the_event_loop_that_asked() -> None:
    copies = Copies(gates={0: Event()})
    batches = RequestBatches(copies.generate, 1, None)

    async def give_up() -> None:
        task = asyncio.create_task(seed_of(batches, request(0)))
        await until(lambda: bool(copies.batches))
        task.cancel()

    run(give_up())
    copies.gates[0].set()
    assert run(seed_of(batches, request(5))) == 5


def test_an_error_reaches_the_requests_of_its_batch_and_the_copy_goes_on() -> None:
    copies = Copies()
    batches = RequestBatches(copies.generate, 2, None)

    async def main() -> list[Any]:
        asked = (seed_of(batches, request(seed)) for seed in (0, BROKEN, 2, 3))
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *broken = (lambda found: (found[0], found[1], found[3]))(run(main()))
    assert first == 0
    assert [str(each) for each in broken] == ["a broken batch"] * 2
    assert run(seed_of(batches, request(5))) == 5


def test_a_pause_waits_for_running_batches_and_holds_back_others() -> None:
    copies = Copies(gates={0: Event()})
    batches = RequestBatches(copies.generate, 1, None)
    seen: list[str] = []

    def pause(asked: Event, goes_on: Event) -> None:
        asked.set()
        with batches.paused():
            seen.append(f"paused after {len(copies.batches)}")
            assert goes_on.wait(60)
            seen.append(f"still {len(copies.batches)}")

    async def main(thread: ThreadPoolExecutor) -> list[int]:
        first = asyncio.create_task(seed_of(batches, request(0)))
        await until(lambda: bool(copies.batches))
        asked, goes_on = Event(), Event()
        pausing = thread.submit(pause, asked, goes_on)
        await until(asked.is_set)
        assert not seen
        copies.gates[0].set()
        await until(lambda: bool(seen))
        second = asyncio.create_task(seed_of(batches, request(1)))
        await asyncio.sleep(0.01)
        goes_on.set()
        pausing.result(60)
        return await asyncio.gather(first, second)

    with ThreadPoolExecutor(1) as thread:
        assert run(main(thread)) == [0, 1]
    assert seen == ["paused after 1", "still 1"]


@pytest.mark.parametrize("most", [None, 3])
def test_every_request_is_answered_once(most: int | None) -> None:
    copies = Copies()
    batches = RequestBatches(copies.generate, 3, most)
    seeds = [seed for seed in range(60) if seed != BROKEN]

    async def late(number: int) -> int:
        for _ in range(number % 7):
            await asyncio.sleep(0)
        return await seed_of(batches, request(number, GREEDY if number % 5 == 0 else SAMPLED))

    async def main() -> list[int]:
        return await asyncio.gather(*map(late, seeds))

    assert run(main()) == seeds
    assert sorted(seed for _, batch in copies.batches for seed in batch) == seeds
    assert most is None or max(len(batch) for _, batch in copies.batches) <= most

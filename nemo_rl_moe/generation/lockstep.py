# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pooling in lockstep: the requests of many tasks are answered together once every task waits.

The batches and their order then do not depend on time, and a run can be repeated bit by bit. The engine of the
trainer's own workers pools requests this way.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationBatch,
    GenerationEngine,
    GenerationRequest,
    SamplingParameters,
)

if TYPE_CHECKING:
    from nemo_rl_moe.generation.registry import EngineSetup

Request = TypeVar("Request")
Result = TypeVar("Result")


class Lockstep(Generic[Request, Result]):
    """A queue of requests that are answered together, sorted by trajectory index (`place`).

    The owner of the waiting tasks calls `answer_all` when all of them wait.

    Args:
        answers: Takes requests, and yields the index of each request with its result.

    Attributes:
        most_at_a_time: Maximum number of requests in one call of `answers`; None: all.
        began_s: Start of the last call of `answers`, on the monotonic clock.
    """

    def __init__(self, answers: Callable[[Sequence[Request]], Iterable[tuple[int, Result]]]):
        self._answers = answers
        self._queued: list[tuple[int, Request, asyncio.Future[Result]]] = []
        self.most_at_a_time: int | None = None
        self.began_s = 0.0

    def queued(self, request: Request, place: int = 0) -> "asyncio.Future[Result]":
        """Queue a request; return its future result."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._queued.append((place, request, future))
        return future

    @property
    def is_waited_for(self) -> bool:
        """Whether any task waits for a result. Cancelled tasks do not count."""
        return any(not future.done() for *_, future in self._queued)

    def answer_all(self) -> Iterator[Result]:
        """Answer all queued requests; hand each result to its task, and yield it."""
        in_order = sorted(self._queued, key=lambda each: each[0])  # stable: equal indices keep their arrival order
        queued = [(request, future) for _, request, future in in_order if not future.done()]
        self._queued = []
        size = self.most_at_a_time or len(queued) or 1
        for start in range(0, len(queued), size):
            part = queued[start : start + size]
            self.began_s = time.monotonic()
            for index, result in self._answers([request for request, _ in part]):
                future = part[index][1]
                if not future.done():
                    future.set_result(result)
                yield result


class LockstepEngine(Lockstep[GenerationRequest, GeneratedSequence], GenerationEngine):
    """The engine that answers requests in batches, and runs the trainer's own weights."""

    shares_weights = True

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        asked_s = time.monotonic()
        found = await self.queued(request, request.place)
        return replace(found, waited_s=max(0.0, self.began_s - asked_s))


def generate_batches(
    generate: Callable[[GenerationBatch], Sequence[GeneratedSequence]], requests: Sequence[GenerationRequest]
) -> Iterator[tuple[int, GeneratedSequence]]:
    """Generate one batch for each set of sampling parameters; yield the request's index and the sequence."""
    by_sampling: dict[SamplingParameters, list[int]] = {}
    for index, request in enumerate(requests):
        by_sampling.setdefault(request.sampling, []).append(index)
    for indices in by_sampling.values():
        batch = GenerationBatch.of([requests[index] for index in indices])
        yield from zip(indices, generate(batch), strict=True)


def make_trainer_engine(setup: "EngineSetup") -> LockstepEngine:
    return LockstepEngine(partial(generate_batches, setup.policy.generate))

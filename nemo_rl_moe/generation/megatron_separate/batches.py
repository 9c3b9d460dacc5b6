# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches of requests as they come: a free copy of the weights takes the waiting requests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Condition

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, GenerationRequest

Waiting = tuple[GenerationRequest, "asyncio.Future[GeneratedSequence]"]
Ended = tuple["asyncio.Future[GeneratedSequence]", GeneratedSequence | Exception]
Generate = Callable[[int, GenerationBatch], Sequence[GeneratedSequence]]


class RequestBatches:
    """Distribution of requests over copies of the weights, in batches that share their sampling parameters.

    Requests that tasks make in one iteration of the event loop are distributed together.

    Args:
        generate: Generates a batch on a copy, given by its index from 0. Called in a thread.
        max_batch_size: Maximum number of sequences that a copy generates at a time; None for no limit.
    """

    def __init__(self, generate: Generate, num_copies: int, max_batch_size: int | None):
        self._generate, self._num_copies, self._max_batch_size = generate, num_copies, max_batch_size
        self._waiting: list[Waiting] = []
        self._free = set(range(num_copies))
        self._is_paused = False
        self._changed = Condition()  # guards all of these
        self._threads = ThreadPoolExecutor(num_copies, "copies")

    async def answer(self, request: GenerationRequest) -> GeneratedSequence:
        """Return the continuation that a request asks for."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GeneratedSequence] = loop.create_future()
        with self._changed:
            self._waiting.append((request, future))
        loop.call_soon(self._deal_out)
        return await future

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until all copies are free, and start no batch inside the context."""
        with self._changed:
            self._is_paused = True
            self._changed.wait_for(lambda: len(self._free) == self._num_copies)
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
            self._deal_out()

    def shutdown(self) -> None:
        """Start no further batch."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _deal_out(self) -> None:
        """Give the waiting requests to free copies; drop requests of cancelled tasks."""
        with self._changed:
            while self._waiting and self._free and not self._is_paused:
                for copy, share in self._next_shares().items():
                    self._free.remove(copy)
                    self._threads.submit(self._run, copy, share)

    def _next_shares(self) -> dict[int, list[Waiting]]:
        """Take the waiting requests with the sampling parameters of the first one, and return them by copy."""
        # Neighbours, often samples of one prompt with similar lengths, go to different copies.
        copies = sorted(self._free)
        self._waiting = [each for each in self._waiting if not each[1].cancelled()]
        if not self._waiting:
            return {}
        sampling = self._waiting[0][0].sampling
        most = None if self._max_batch_size is None else self._max_batch_size * len(copies)
        chosen = [each for each in self._waiting if each[0].sampling == sampling][:most]
        taken = {id(future) for _, future in chosen}
        self._waiting = [each for each in self._waiting if id(each[1]) not in taken]
        shares = {copy: chosen[number :: len(copies)] for number, copy in enumerate(copies)}
        return {copy: share for copy, share in shares.items() if share}

    def _run(self, copy: int, share: Sequence[Waiting]) -> None:
        ended: list[Ended]
        try:
            sequences = self._generate(copy, GenerationBatch.of([request for request, _ in share]))
            ended = [(future, found) for (_, future), found in zip(share, sequences, strict=True)]
        except Exception as error:
            ended = [(future, error) for _, future in share]
        _hand_over(ended)
        with self._changed:
            self._free.add(copy)
            self._changed.notify_all()
        self._deal_out()


def _hand_over(ended: Sequence[Ended]) -> None:
    """Set results from another thread. This wakes an event loop once per batch, not once per sequence."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Ended]] = {}
    for future, result in ended:
        by_loop.setdefault(future.get_loop(), []).append((future, result))
    for loop, of_loop in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed, so nothing waits
            loop.call_soon_threadsafe(_set_results, of_loop)


def _set_results(ended: Sequence[Ended]) -> None:
    for future, result in ended:
        if future.cancelled():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

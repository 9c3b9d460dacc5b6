# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Scoring of responses, and of whole groups, as they come."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

Item = TypeVar("Item")
Scored = TypeVar("Scored")


class ScoringQueue(Generic[Item, Scored]):
    """Items that a thread scores: each batch is what has come while the one before it was scored.

    Args:
        score: Scores many items, in their order; called by one thread at a time.
    """

    def __init__(self, score: Callable[[Sequence[Item]], list[Scored]]):
        self._score = score
        self._queued: list[tuple[Item, asyncio.Future[Scored]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Scored:
        """Score one item."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Scored] = loop.create_future()
        self._queued.append((item, future))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._score_all(), context=Context())  # its time is no trajectory's
        return await future

    async def _score_all(self) -> None:
        while self._queued:
            batch, self._queued = self._queued, []
            try:
                scores = await asyncio.to_thread(self._score, [item for item, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

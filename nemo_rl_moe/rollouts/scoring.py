# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Scoring of responses and groups: all together in lockstep, or as they arrive."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from nemo_rl_moe.generation.lockstep import Lockstep

Item = TypeVar("Item")
Scored = TypeVar("Scored")


class ScoringQueue(Lockstep[Item, Scored]):
    """A queue of items to score. All queued items are scored together.

    In lockstep, they are scored when all trajectories wait. Otherwise a thread scores them as they arrive.

    Args:
        score: Scores items in their order. Called by one thread at a time.
        in_lockstep: Whether the supervisor calls `answer_all` when all trajectories wait.
    """

    def __init__(self, score: Callable[[Sequence[Item]], list[Scored]], *, in_lockstep: bool):
        super().__init__(lambda items: enumerate(score(items)))
        self._score, self._in_lockstep = score, in_lockstep
        self._task: asyncio.Task[None] | None = None

    async def ask(self, request: Item, place: int) -> Scored:
        """Return the score of one item.

        In lockstep, the queued items are scored when all trajectories wait, sorted by `place`: the index of the
        trajectory or group.
        """
        future = self.queued(request, place)
        if not self._in_lockstep and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._score_all())
        return await future

    async def _score_all(self) -> None:
        while self._queued:
            batch, self._queued = self._queued, []
            try:
                scores = await asyncio.to_thread(self._score, [item for _, item, _ in batch])
            except Exception as error:
                for *_, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (*_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Places that trajectories wait for and hold, such as processes of agents: nobody holds one while a validation runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

Place = TypeVar("Place")


class WaitAside(Protocol):
    """Awaits something for which other trajectories are not kept waiting."""

    def __call__(self, answer: Coroutine[Any, Any, Place], /) -> Awaitable[Place]:
        """Await it, and return what it gives."""
        ...


class HeldPlaces:
    """The places that the trajectories of one event loop hold.

    Training and validation share places. A trajectory of training that waits at a closed engine would keep its place
    from a validation that the engine waits for: both would wait for ever. So places are taken back first: who holds
    one goes on to its end, and nobody gets another.
    """

    def __init__(self) -> None:
        self._num_held = 0
        self._are_lent, self._are_free = asyncio.Event(), asyncio.Event()
        self._are_lent.set()
        self._are_free.set()

    @property
    def are_free(self) -> bool:
        """Return whether nobody holds one."""
        return not self._num_held

    @asynccontextmanager
    async def held(
        self,
        take: Callable[[], Coroutine[Any, Any, Place]],
        give_back: Callable[[Place], object],
        wait_aside: WaitAside,
    ) -> AsyncIterator[Place]:
        """Hold a place inside.

        Args:
            take: Waits for one; cancelled, it has none.
            give_back: Gives it to the next.
            wait_aside: Awaits what others are not kept waiting for.
        """
        place = await wait_aside(self._taken(take, give_back))
        try:
            yield place
        finally:
            give_back(place)
            self._num_held -= 1
            if not self._num_held:
                self._are_free.set()

    def keep(self) -> None:
        """Let nobody take another one, until `lend`."""
        self._are_lent.clear()

    def lend(self) -> None:
        """Let trajectories take places again."""
        self._are_lent.set()

    async def wait_until_free(self) -> None:
        """Wait until nobody holds one."""
        await self._are_free.wait()

    async def _taken(
        self, take: Callable[[], Coroutine[Any, Any, Place]], give_back: Callable[[Place], object]
    ) -> Place:
        while True:
            await self._are_lent.wait()
            place = await take()
            if self._are_lent.is_set():
                break
            give_back(place)
        self._num_held += 1
        self._are_free.clear()
        return place

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gate before a generation engine. It is closed while weights arrive. Aborted requests continue afterwards."""

import asyncio
import time
from dataclasses import replace

import numpy as np

from nemo_rl_moe.generation.interface import (
    CAPTURED,
    GeneratedSequence,
    GenerationEngine,
    GenerationRequest,
)
from nemo_rl_moe.rollouts.dispatch.activity import EngineActivity


class EngineGate:
    """Sends requests to an engine, except while its weights change.

    When the gate closes, the engine first aborts or finishes its requests.
    """

    def __init__(self, engine: GenerationEngine, activity: EngineActivity | None = None):
        self._engine, self._activity = engine, activity or EngineActivity()
        self._is_open, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_idle.set()
        self._num_running = 0

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        """Return the continuation of a sequence. If the weights change meanwhile, the new ones sample the rest."""
        found = await self._ask(request)
        while found.is_partial:
            fed = len(request.token_ids) + len(found.token_ids) - 1  # no pass has seen the last token yet
            captured = {name: rows for name in CAPTURED if (rows := getattr(found, name)) is not None}
            found = replace(found, **{name: rows.before(fed) for name, rows in captured.items()})
            found = found.followed_by(await self._ask(rest_of(request, found)))
        return found

    async def close(self) -> None:
        """Hold back further requests, and wait until the engine has none."""
        self._is_open.clear()
        self._activity.paused()
        await self._engine.pause()
        await self._is_idle.wait()

    def open(self) -> None:
        self._activity.resumed()
        self._is_open.set()

    async def _ask(self, request: GenerationRequest) -> GeneratedSequence:
        asked_s = time.monotonic()
        while not self._is_open.is_set():
            await self._is_open.wait()
        waited_s = time.monotonic() - asked_s
        self._num_running += 1
        self._activity.request_began()
        self._is_idle.clear()
        try:
            found = await self._engine.generate(request)
            return replace(found, waited_s=waited_s + found.waited_s)
        finally:
            self._num_running -= 1
            self._activity.request_ended()
            if not self._num_running:
                self._is_idle.set()


def rest_of(request: GenerationRequest, found: GeneratedSequence) -> GenerationRequest:
    """Return the request for the rest of a sequence, with a seed that no turn of a trajectory has."""
    size = len(found.token_ids)
    if not size:
        return request
    return replace(
        request,
        token_ids=(*request.token_ids, *found.token_ids.tolist()),
        # A third number instead of the spawn key would not suffice, as numpy ignores trailing zeros.
        seed=int(np.random.SeedSequence([request.seed, size], spawn_key=(1,)).generate_state(1, np.uint64)[0]),
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - size),
    )

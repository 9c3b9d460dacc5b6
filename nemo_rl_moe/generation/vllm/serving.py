# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Distribution of requests over vLLM's engines as these have capacity, and of answers as sequences finish.

One task of the event loop does this while any request waits. A thread waits for the actors.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.generation.refit import reason_of
from nemo_rl_moe.generation.vllm.actors import PROGRESS, EngineActor, EngineActors

LOOK_S = 0.05
"""Maximum seconds of one wait for results. Streams that start meanwhile are included in the next wait."""
POLL_S = 2.0
"""Seconds between two checks of the engines' progress."""


@dataclass(frozen=True)
class _Waiting:
    request: GenerationRequest
    future: "asyncio.Future[GeneratedSequence]"


class Serving:
    """Serving of requests by the present engines.

    Args:
        prepare: Wakes the engines and gives them weights if needed; returns the version of the weights. Also gives
            up engines that are lost meanwhile.
    """

    def __init__(self, actors: EngineActors, prepare: Callable[[], int]):
        self._actors, self._prepare = actors, prepare
        self._numbers = count()
        self._waiting: dict[int, _Waiting] = {}
        self._undealt: list[int] = []
        self._version = 0
        self._is_open = False
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "vLLM engines")

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._begin(loop)
        number = next(self._numbers)
        self._waiting[number] = _Waiting(request, loop.create_future())
        self._undealt.append(number)
        if self._is_open:
            self._deal_out()
        try:
            return await self._waiting[number].future
        finally:
            self._waiting.pop(number, None)

    async def come_to_rest(self) -> None:
        """Have engines answer all requests with the tokens so far. Requests with stop strings are completed."""
        if self._task is None or self._task.done():
            return
        self._break_off(is_wanted=True)
        await asyncio.wait([self._task])
        self._break_off(is_wanted=False)

    def _break_off(self, *, is_wanted: bool) -> None:
        for actor in self._actors.present:
            actor.handle.break_off.options(concurrency_group=PROGRESS).remote(is_wanted)

    def drain(self) -> None:
        """Let engines finish requests that nothing waits for, after an interrupted call."""
        for actor in [each for each in self._actors.present if each.results is not None]:
            while actor.results is not None and actor in self._actors.present:
                ready, _ = ray.wait([actor.results], num_returns=1, timeout=self._actors.stall_timeout_s)
                if ready:
                    self._take(actor)
                else:
                    self._lose(actor, f"made no step for {self._actors.stall_timeout_s:g} s")

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_open = False
        self._waiting.clear()  # of a loop that has ended
        self._undealt.clear()
        self._task = loop.create_task(self._serve())

    async def _serve(self) -> None:
        """Serve requests until none waits.

        As a new task, this begins after the tasks that are already scheduled have made their requests.
        """
        try:
            self.drain()
            most_lost = self._actors.num_lost + 2 * self._actors.number
            while self._waiting:
                self._version = self._prepare()
                self._is_open = True
                self._deal_out()
                await self._answer()
                self._is_open = False
                if self._actors.num_lost > most_lost:
                    raise GenerationError("vLLM's engines fail again and again; the last reason is reported above")
        except Exception as error:
            for waiting in self._waiting.values():
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            self._waiting.clear()
        finally:
            self._is_open = False

    def _deal_out(self) -> None:
        """Give each request to the engine with the fewest requests. This spreads the similar samples of one prompt."""
        # Requests beyond the engines' capacity wait here, so that no engine runs dry while another has a queue.
        shares: dict[int, dict[int, GenerationRequest]] = {actor.number: {} for actor in self._actors.present}
        undealt, self._undealt = [each for each in self._undealt if each in self._waiting], []
        for position, number in enumerate(undealt):
            with_room = [actor for actor in self._actors.present if len(actor.requests) < actor.window]
            if not with_room:
                self._undealt = undealt[position:]
                break
            actor = min(with_room, key=lambda each: (len(each.requests), each.number))
            actor.requests.add(number)
            shares[actor.number][number] = self._waiting[number].request
        for actor in self._actors.present:
            if not (share := shares[actor.number]):
                continue
            if actor.results is None:
                self._start_stream(actor, share)
            else:
                actor.handle.add.options(concurrency_group=PROGRESS).remote(share)

    def _start_stream(self, actor: EngineActor, share: Mapping[int, GenerationRequest]) -> None:
        actor.results = actor.handle.generate.options(num_returns="streaming").remote(share, self._version)
        actor.progress, actor.since = -1, time.monotonic()

    async def _answer(self) -> None:
        loop, looked = asyncio.get_running_loop(), time.monotonic()
        while busy := [actor for actor in self._actors.present if actor.results is not None]:
            streams = [actor.results for actor in busy]
            wait = partial(ray.wait, streams, num_returns=1, timeout=LOOK_S)
            ready, _ = await loop.run_in_executor(self._thread, wait)
            for actor in [each for each in busy if each.results in ready]:
                self._take(actor)
            if time.monotonic() - looked > POLL_S:
                for actor in await loop.run_in_executor(self._thread, self._stalled, busy):
                    self._lose(actor, f"made no step for {self._actors.stall_timeout_s:g} s")
                looked = time.monotonic()

    def _take(self, actor: EngineActor) -> None:
        """Read an engine's stream, which must be ready: pass its next answers to their requests, or note its end."""
        try:
            answers = ray.get(next(actor.results))
        except StopIteration:
            actor.results = None
            if actor.requests:  # requests that came after the end of the stream
                self._start_stream(actor, {})
            return
        except RayError as error:
            self._lose(actor, reason_of(error))
            return
        actor.since = time.monotonic()
        for number, sequence in answers:
            actor.requests.discard(number)
            waiting = self._waiting.pop(number, None)
            if waiting is not None and not waiting.future.done():
                waiting.future.set_result(sequence)
        if self._is_open and self._undealt:
            self._deal_out()

    def _lose(self, actor: EngineActor, reason: str) -> None:
        """Give up an engine, and pass its requests to the others."""
        self._actors.give_up(actor, reason)
        self._undealt += sorted(actor.requests & self._waiting.keys())
        if self._is_open:
            self._deal_out()

    def _stalled(self, busy: Sequence[EngineActor]) -> list[EngineActor]:
        """Return engines that have made no step for too long, or are frozen and do not answer."""
        questions: dict[Any, EngineActor] = {
            actor.ask_num_steps(): actor for actor in busy if actor.results is not None
        }
        if not questions:
            return []
        answered, _ = ray.wait(list(questions), num_returns=len(questions), timeout=POLL_S)
        now = time.monotonic()
        for answer in answered:
            with suppress(RayError):  # a dead engine is noticed when its results are read
                steps, actor = ray.get(answer), questions[answer]
                if steps != actor.progress:
                    actor.progress, actor.since = steps, now
        too_long = self._actors.stall_timeout_s
        return [a for a in questions.values() if a.results is not None and now - a.since > too_long]

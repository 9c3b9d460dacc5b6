# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests on their way to vLLM's engines: dealt out as they come, dealt out anew when one is lost; Ray is scripted."""

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.vllm import serving
from nemo_rl_moe.generation.vllm.actors import EngineActor
from nemo_rl_moe.generation.vllm.serving import Serving

SAMPLING = SamplingParameters(max_new_tokens=4)
LOST = 666
"""A request with this seed ends the engine that has it, once."""


class Call:
    """A method of an actor."""

    def __init__(self, function: Any):
        self._function = function

    def options(self, **_: object) -> "Call":
        return self

    def remote(self, *arguments: object) -> Any:
        return self._function(*arguments)


class Stream:
    """A stream of answers, one a step: that of the oldest request."""

    def __init__(self, worker: "Worker", version: int):
        self._worker, self._version = worker, version

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        worker = self._worker
        with worker.lock:
            if not worker.inbox:
                raise StopIteration
            number = min(worker.inbox)
            request = worker.inbox.pop(number)
        if request.seed == LOST and worker.fatal:
            worker.fatal.pop()
            return RayActorError()
        worker.order.append(request.seed)
        tokens = np.array([request.seed])
        found = GeneratedSequence(tokens, np.zeros(1, np.float32), False, self._version)
        return [(number, replace(found, is_partial=worker.breaks_off))]


class Worker:
    """An engine's actor, as its handle is used."""

    def __init__(self, fatal: list[int]):
        self.inbox: dict[int, GenerationRequest] = {}
        self.order: list[int] = []
        self.calls: list[int] = []
        self.fatal, self.lock = fatal, threading.Lock()
        self.generate, self.add = Call(self._generate), Call(self._add)
        self.num_steps = Call(lambda: len(self.order))
        self.break_off, self.breaks_off = Call(self._break_off), False

    def _add(self, requests: Mapping[int, GenerationRequest]) -> None:
        with self.lock:
            self.inbox.update(requests)

    def _break_off(self, is_wanted: bool) -> None:
        self.breaks_off = is_wanted

    def _generate(self, requests: Mapping[int, GenerationRequest], version: int) -> Stream:
        self.calls.append(len(requests))
        self._add(requests)
        return Stream(self, version)


class Actors:
    """The actors, as `Serving` uses them."""

    def __init__(self, number: int, num_fatal: int = 0):
        self.stall_timeout_s, self.number, self.num_lost = 60.0, number, 0
        self._fatal = [1] * num_fatal
        self.reported: list[str] = []
        self.present: list[EngineActor] = []
        self.start()

    def start(self) -> None:
        for number in set(range(self.number)) - {actor.number for actor in self.present}:
            self.present.append(EngineActor(number, Worker(self._fatal)))

    def give_up(self, actor: EngineActor, reason: str) -> None:
        self.present.remove(actor)
        self.num_lost += 1
        self.reported.append(f"{actor.name} {reason}")


@pytest.fixture(autouse=True)
def scripted_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(streams: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        return streams, []

    monkeypatch.setattr(serving, "ray", SimpleNamespace(wait=wait, get=get))


def request(seed: int) -> GenerationRequest:
    return GenerationRequest((1,), seed, SAMPLING)


def serving_of(actors: Actors) -> Serving:
    def prepare() -> int:
        if not actors.present:
            actors.start()
        return 7

    return Serving(actors, prepare)  # type: ignore[arg-type]


def generated(actors: Actors, seeds: Iterable[int], **how: bool) -> list[Any]:
    """What comes back for requests that are made at once; `how` as for `asyncio.gather`."""

    async def all_at_once() -> list[Any]:
        serve = serving_of(actors)
        return await asyncio.gather(*(serve.generate(request(seed)) for seed in seeds), **how)

    return asyncio.run(all_at_once())


def test_requests_that_come_together_are_dealt_out_evenly_in_one_call_each() -> None:
    actors = Actors(2)
    found = generated(actors, range(7))
    assert [int(sequence.token_ids[0]) for sequence in found] == list(range(7))
    assert {sequence.weight_version for sequence in found} == {7}
    workers = [actor.handle for actor in actors.present]
    assert [worker.order for worker in workers] == [[0, 2, 4, 6], [1, 3, 5]]
    assert [worker.calls for worker in workers] == [[4], [3]]


def test_engines_get_more_when_they_have_room() -> None:
    """What one engine takes long for does not lie in its queue while the other has nothing to do."""
    actors = Actors(2)
    slow, quick = actors.present
    slow.window = quick.window = 2
    slow_worker: Any = slow.handle
    served: list[int] = []

    def wait(streams: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        assert all(len(actor.requests) <= actor.window for actor in actors.present)
        served.append(len(streams))
        # The slow one answers when the other has nothing left.
        return [stream for stream in streams if stream._worker is not slow_worker] or streams, []

    serving.ray.wait = wait  # type: ignore[attr-defined]  # scripted
    found = generated(actors, range(9))
    assert [int(sequence.token_ids[0]) for sequence in found] == list(range(9))
    assert [slow_worker.order, quick.handle.order] == [[0, 2], [1, 3, 4, 5, 6, 7, 8]]


def test_requests_that_wait_for_room_go_to_another_engine_when_one_is_lost() -> None:
    actors = Actors(2, num_fatal=1)
    for actor in actors.present:
        actor.window = 1
    found = generated(actors, (1, LOST, 2, 3))
    assert [int(sequence.token_ids[0]) for sequence in found] == [1, LOST, 2, 3]


def test_a_later_request_joins_the_engine_that_has_the_fewest() -> None:
    actors = Actors(2)

    async def one_after_the_other() -> None:
        serve = serving_of(actors)
        first = [asyncio.create_task(serve.generate(request(seed))) for seed in range(6)]
        await first[0]
        assert int((await serve.generate(request(100))).token_ids[0]) == 100
        await asyncio.gather(*first)
        assert int((await serve.generate(request(200))).token_ids[0]) == 200, "also when all had ended"

    asyncio.run(one_after_the_other())
    assert sum(len(actor.handle.order) for actor in actors.present) == 8


def test_what_a_lost_engine_had_goes_to_the_others() -> None:
    actors = Actors(2, num_fatal=1)
    found = generated(actors, (1, 2, LOST, 3, 4, 5))
    assert [int(sequence.token_ids[0]) for sequence in found] == [1, 2, LOST, 3, 4, 5]
    assert actors.reported == ["vLLM engine 0 died"]


def test_engines_that_fail_again_and_again_end_all_requests() -> None:
    actors = Actors(1, num_fatal=100)
    found = generated(actors, (LOST, 1), return_exceptions=True)
    assert all(isinstance(error, GenerationError) for error in found)
    assert actors.num_lost == 3


def test_a_call_that_is_broken_off_leaves_nothing_for_the_next_one() -> None:
    actors = Actors(1)
    serve = serving_of(actors)

    async def broken_off() -> None:
        tasks = [asyncio.create_task(serve.generate(request(seed))) for seed in range(4)]
        await tasks[0]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def again() -> int:
        return int((await serve.generate(request(9))).token_ids[0])

    asyncio.run(broken_off())
    serve.drain()
    assert actors.present[0].results is None
    assert asyncio.run(again()) == 9


def test_engines_come_to_rest_with_all_requests_answered_and_take_others_behind() -> None:
    """A22: what is broken off is answered by what there is of it, and not lost."""
    actors = Actors(2)

    async def body() -> tuple[list[GeneratedSequence], GeneratedSequence]:
        serve = serving_of(actors)
        first = [asyncio.create_task(serve.generate(request(seed))) for seed in range(6)]
        abandoned = asyncio.create_task(serve.generate(request(99)))
        await asyncio.sleep(0)
        abandoned.cancel()
        await serve.come_to_rest()
        found = [task.result() for task in first]
        assert all(actor.results is None for actor in actors.present), "no engine has work"
        await serve.come_to_rest()
        return found, await serve.generate(request(7))

    found, later = asyncio.run(body())
    assert all(sequence.is_partial for sequence in found)
    assert not later.is_partial


def test_an_engine_whose_ray_has_ended_starts_no_other() -> None:
    assert not ray.is_initialized()
    with mock.patch.object(ray, "kill") as asked:  # Ray's own starts it where there is none
        EngineActor(0, object()).end()
    asked.assert_not_called()

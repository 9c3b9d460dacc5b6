# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that arrive while sequences are generated: what is broken off goes on, and each token has its version."""

import asyncio
from dataclasses import replace

import numpy as np

from nemo_rl_moe.distributed.stored_rows import StoredRows, fetch_rows
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.rollouts.dispatch.gate import EngineGate, rest_of

SAMPLING = SamplingParameters(max_new_tokens=6)
REQUEST = GenerationRequest((10, 11), seed=3, sampling=SAMPLING)
PAD_ROUTES = 1


class WholeEngine(GenerationEngine):
    """Takes a second a token, and cannot be broken off; its tokens are the versions of its weights."""

    def __init__(self) -> None:
        self.version, self.requests = 0, list[GenerationRequest]()

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        self.requests.append(request)
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_new_tokens and not self.is_interrupted:
            await asyncio.sleep(1.0)
            tokens.append(self.version)
        return self.sequence(request, tokens)

    @property
    def is_interrupted(self) -> bool:
        return False

    def sequence(self, request: GenerationRequest, tokens: list[int]) -> GeneratedSequence:
        """Return tokens with routes that name version and position; one row too many, as some engines give."""
        size = len(request.token_ids) + len(tokens)
        routes = np.stack([np.full(size, self.version), np.arange(size)], 1)[:, None].astype(np.int16)
        routes[-PAD_ROUTES:] = -1
        return GeneratedSequence(
            np.array(tokens, dtype=np.int64),
            np.full(len(tokens), -0.5),
            is_truncated=True,
            weight_version=self.version,
            routed_experts=StoredRows.of(routes),
            is_partial=len(tokens) < request.sampling.max_new_tokens,
        )


class BrokenOffEngine(WholeEngine):
    """Gives what there is when it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self._is_interrupted = False

    @property
    def is_interrupted(self) -> bool:
        return self._is_interrupted

    async def pause(self) -> None:
        self._is_interrupted = True

    def go_on(self, version: int) -> None:
        self.version, self._is_interrupted = version, False


async def test_a_sequence_goes_on_under_new_weights_and_each_token_keeps_its_version() -> None:
    engine = BrokenOffEngine()
    gate = EngineGate(engine)
    task = asyncio.create_task(gate.generate(REQUEST))
    for version, seconds in ((1, 2.5), (2, 0.0), (3, 0.5)):
        await asyncio.sleep(seconds)
        await gate.close()
        assert not task.done()
        engine.go_on(version)
        gate.open()
    found = await task
    assert [len(request.token_ids) for request in engine.requests] == [2, 5, 6, 7]
    assert [request.sampling.max_new_tokens for request in engine.requests] == [6, 3, 2, 1]
    assert len({request.seed for request in engine.requests}) == 4
    assert found.token_ids.tolist() == [0, 0, 0, 1, 2, 3]
    assert np.asarray(found.weight_version).tolist() == [0, 0, 0, 1, 2, 3]
    assert not found.is_partial
    assert len(found.logprobs) == 6


async def test_routes_of_a_sequence_that_was_broken_off_are_contiguous() -> None:
    """A18: neither doubled nor with a gap; a token has the routes of the pass that first saw it."""
    engine = BrokenOffEngine()
    gate = EngineGate(engine)
    task = asyncio.create_task(gate.generate(REQUEST))
    await asyncio.sleep(2.5)
    await gate.close()
    engine.go_on(1)
    gate.open()
    found = (await task).routed_experts
    assert found is not None
    rows = fetch_rows([found.before(7)], 8, -7, list, (1, 2), "int16")[0]
    assert rows[:, 0, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, -7], "one row for each token that was fed"
    assert rows[:7, 0, 0].tolist() == [0, 0, 0, 0, 1, 1, 1]


async def test_an_engine_that_cannot_be_broken_off_ends_what_it_has_before_its_weights_change() -> None:
    engine = WholeEngine()
    gate = EngineGate(engine)
    first = asyncio.create_task(gate.generate(REQUEST))
    await asyncio.sleep(2.5)
    closing = asyncio.create_task(gate.close())
    second = asyncio.create_task(gate.generate(replace(REQUEST, seed=4)))
    await closing
    assert first.done()
    assert asyncio.get_running_loop().time() == 6.0
    await asyncio.sleep(10.0)
    assert len(engine.requests) == 1, "who comes later waits"
    engine.version = 1
    gate.open()
    assert (await second).token_ids.tolist() == [1] * 6
    assert (await first).token_ids.tolist() == [0] * 6


async def test_a_request_that_nobody_waits_for_does_not_keep_the_gate() -> None:
    gate = EngineGate(WholeEngine())
    task = asyncio.create_task(gate.generate(REQUEST))
    await asyncio.sleep(0.5)
    task.cancel()
    await gate.close()
    assert asyncio.get_running_loop().time() < 1.0


def test_the_rest_of_a_response_has_a_seed_that_no_turn_has() -> None:
    """One that is broken off after k tokens went on with the seed of the trajectory's turn k."""
    of_turns = {int(np.random.SeedSequence([3, turn]).generate_state(1, np.uint64)[0]) for turn in range(1, 6)}
    rests = set()
    for size in range(1, 6):
        found = GeneratedSequence(np.arange(size), np.zeros(size), False, 0, is_partial=True)
        rests.add(rest_of(REQUEST, found).seed)
    assert len(rests) == len(of_turns) == 5
    assert not rests & of_turns

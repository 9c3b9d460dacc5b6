# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds in which a request is held back are told apart from those in which an engine works on it."""

import asyncio
import time
from collections.abc import Iterator, Sequence

import numpy as np

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.rollouts.dispatch.gate import EngineGate

REQUEST = GenerationRequest((1,), 0, SamplingParameters(4))
SEQUENCE = GeneratedSequence(np.array([5]), np.array([-0.5]), False, 0)
HELD_S, WORK_S = 0.08, 0.05


def answers(requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
    time.sleep(WORK_S)
    yield from ((index, SEQUENCE) for index in range(len(requests)))


def test_a_request_in_lockstep_waits_until_all_do() -> None:
    async def ask() -> tuple[GeneratedSequence, float]:
        engine = LockstepEngine(answers)
        asked_s = time.monotonic()
        task = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(HELD_S)
        list(engine.answer_all())
        return await task, time.monotonic() - asked_s

    found, seconds = asyncio.run(ask())
    assert HELD_S * 0.9 <= found.waited_s <= seconds - WORK_S * 0.9


def test_a_request_before_a_closed_gate_waits_until_it_opens() -> None:
    async def ask() -> GeneratedSequence:
        engine = LockstepEngine(answers)
        gate = EngineGate(engine)
        await gate.close()
        task = asyncio.create_task(gate.generate(REQUEST))
        await asyncio.sleep(HELD_S)
        gate.open()
        while not engine.is_waited_for:
            await asyncio.sleep(0)
        list(engine.answer_all())
        return await task

    assert asyncio.run(ask()).waited_s >= HELD_S * 0.9


def test_waits_of_a_sequence_in_parts_add_up() -> None:
    one, other = (GeneratedSequence(np.array([5]), np.array([-0.5]), False, 0, waited_s=each) for each in (0.5, 2.0))
    assert one.followed_by(other).waited_s == 2.5

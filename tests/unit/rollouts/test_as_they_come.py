# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts with an engine that takes requests as they come: no trajectory waits for another one."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Environment, Session, SingleTurn
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.supervisor import STOP_GRACE_S, RolloutReports, RolloutsGivenUpError
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.clocks_and_disks import MovedClock
from tests.support.grpo_fakes import END_TOKEN, SAMPLING, make_runner, prompts

SLOW = "train:0"


@dataclass
class OpenEngine(GenerationEngine):
    """Answers each request by itself; those of the first prompt when the test opens the gate.

    Attributes:
        gate: Holds the first request of the first prompt, which is the shortest.
        num_requests: So far.
        problem: Raised at the request of this number.
    """

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_requests: int = 0
    problem: tuple[int, Exception] | None = None
    shares_weights: bool = True

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        self.num_requests += 1
        if self.problem is not None and self.num_requests == self.problem[0]:
            raise self.problem[1]
        if len(request.token_ids) == len(prompts(1)[0].token_ids):
            await self.gate.wait()
        return GeneratedSequence(np.array([5 + request.seed % 7, END_TOKEN]), np.zeros(2), False, 0)


@dataclass
class RewardFunction:
    """Scores by a function, and notes the thread."""

    threads: set[str] = field(default_factory=set)
    items: list[str] = field(default_factory=list)

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        self.threads.add(threading.current_thread().name)
        self.items += [item.sample_id for item in items]
        return [Score(1.0, is_correct=True) for _ in items]


def run(
    environment: Environment,
    engine: OpenEngine,
    reward_function: RewardFunction,
    clock: MovedClock | None = None,
    timeout_s: float | None = None,
) -> list[Trajectory]:
    loop = None if clock is None else CallersLoop(clock.loop())
    reports = RolloutReports(lambda: None if clock is None else "SIGTERM")
    runner = make_runner(engine, reward_function, environment, loop=loop, reports=reports, timeout_s=timeout_s)  # type: ignore[arg-type]
    try:
        return runner.evaluate(prompts(3), 1, SAMPLING, (3, 1))
    finally:
        runner.close()


def test_a_trajectory_goes_on_and_is_scored_while_another_one_is_generated() -> None:
    engine, reward_function = OpenEngine(), RewardFunction()
    done: list[str] = []

    async def two_turns(session: Session) -> Trajectory:
        await session.generate()
        session.append([42])
        await session.generate()
        found = session.finish(await session.score())
        done.append(session.prompt.sample_id)
        if len(done) == 2:
            engine.gate.set()
        return found

    found = run(RolloutFunction(two_turns, "here:function"), engine, reward_function)
    assert done[-1] == SLOW, "the others were whole before its first sequence was there"
    assert [trajectory.num_turns for trajectory in found] == [2, 2, 2]
    assert [trajectory.sample_id for trajectory in found] == ["train:0", "train:1", "train:2"]
    assert sorted(reward_function.items) == ["train:0", "train:1", "train:2"]
    assert threading.current_thread().name not in reward_function.threads


def test_an_error_of_the_engine_or_of_the_reward_function_ends_the_run_with_itself() -> None:
    class Broken(RewardFunction):
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            raise RuntimeError("the workers are gone")

    async def careful(session: Session) -> Trajectory:
        try:
            await session.generate()
            return session.finish(await session.score())
        except Exception:
            return session.finish(Score(0.0, is_correct=False))

    for environment in (SingleTurn(), RolloutFunction(careful, "here:function")):
        engine = OpenEngine(problem=(2, RuntimeError("the engine is gone")))
        with pytest.raises(RuntimeError, match="the engine is gone"):
            run(environment, engine, RewardFunction())
        engine = OpenEngine()
        engine.gate.set()
        with pytest.raises(RuntimeError, match="the workers are gone"):
            run(environment, engine, Broken())


def test_a_request_to_stop_waits_for_the_engine_and_gives_up_what_hangs() -> None:
    clock = MovedClock()
    engine = OpenEngine()

    async def opens_late(session: Session) -> Trajectory:
        if session.prompt.sample_id != SLOW:
            clock.move(STOP_GRACE_S + 1)
            asyncio.get_running_loop().call_later(0.5, engine.gate.set)
        await session.generate()
        return session.finish(Score(1.0, is_correct=True))

    assert len(run(RolloutFunction(opens_late, "here:function"), engine, RewardFunction(), clock)) == 3

    async def hangs(session: Session) -> Trajectory:
        await session.generate()
        clock.move_soon(STOP_GRACE_S + 1)
        await asyncio.Event().wait()
        raise AssertionError

    engine = OpenEngine()
    engine.gate.set()
    with pytest.raises(RolloutsGivenUpError):
        run(RolloutFunction(hangs, "here:function"), engine, RewardFunction(), clock)


def test_time_that_a_tool_hangs_counts_while_others_are_generated() -> None:
    engine = OpenEngine()

    async def hangs(session: Session) -> Trajectory:
        if session.prompt.sample_id == "train:1":
            await asyncio.Event().wait()
        if session.prompt.sample_id == "train:2":
            asyncio.get_running_loop().call_later(1.0, engine.gate.set)
        await session.generate()
        return session.finish(Score(1.0, is_correct=True))

    started = time.monotonic()
    found = run(RolloutFunction(hangs, "here:function"), engine, RewardFunction(), timeout_s=0.5)
    assert [trajectory.fault for trajectory in found] == [None, Fault.TIMEOUT, None], time.monotonic() - started

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout functions that hang: they cost their trajectory, are reported, and give way to a request to stop."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.supervisor import QUIET_S, STOP_GRACE_S, RolloutReports, RolloutsGivenUpError, check_s
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.clocks_and_disks import MovedClock
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_runner, prompts

FOR_EVER_S = 3600.0
TIMEOUT_S = 600.0


@dataclass
class Rollouts:
    """Rollouts of one function under a moved clock. The function gets the session and the clock."""

    function: Callable[[Session, MovedClock], Awaitable[Trajectory]]
    engine: FakeEngine = field(default_factory=FakeEngine)
    stop: str | None = None
    timeout_s: float | None = TIMEOUT_S
    clock: MovedClock = field(default_factory=MovedClock)
    reported: list[str] = field(default_factory=list)

    def run(self, num_prompts: int = 3) -> list[Trajectory]:
        async def rollout(session: Session) -> Trajectory:
            return await self.function(session, self.clock)

        runner = make_runner(
            self.engine,
            FakeRewardFunction(),
            RolloutFunction(rollout, "tools:use_tools"),
            loop=CallersLoop(self.clock.loop()),
            reports=RolloutReports(lambda: self.stop, self.reported.append, self.reported.append),
            timeout_s=self.timeout_s,
        )
        try:
            return runner.evaluate(prompts(num_prompts), 1, SAMPLING, (3, 1))
        finally:
            runner.close()


def is_faulty(session: Session) -> bool:
    return session.prompt.sample_id == "train:1"


def assert_faulty_alone(found: list[Trajectory]) -> None:
    assert [trajectory.fault for trajectory in found] == [None, Fault.TIMEOUT, None]
    assert found[1].fault_message.startswith("took longer than env.rollout_timeout_s=600 (at test_rollout_limits.py:")
    assert found[1].fault_message.endswith(" in look_up_for_ever)")
    assert (found[1].reward, found[1].num_turns) == (0.0, 1), "what it had is kept"
    assert [trajectory.num_turns for trajectory in found] == [2, 1, 2]


async def two_turns(session: Session) -> Trajectory:
    await session.generate()
    return session.finish(Score(1.0, is_correct=True))


async def look_up_for_ever() -> None:
    await asyncio.Event().wait()


def test_t18_a_tool_that_hangs_costs_its_trajectory_alone() -> None:
    cancelled: list[str] = []

    async def hangs(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        if is_faulty(session):
            clock.move_soon(TIMEOUT_S + 1)
            try:
                await look_up_for_ever()
            except asyncio.CancelledError:
                cancelled.append(session.prompt.sample_id)
                raise
        return await two_turns(session)

    assert_faulty_alone(Rollouts(hangs).run())
    assert cancelled == ["train:1"], "its code hears of it"


def test_code_that_cannot_be_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_moe.rollouts.loops.CLEANUP_S", 0.1)

    async def stubborn(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        if is_faulty(session):
            clock.move(TIMEOUT_S + 1)
            while not over.is_set():
                with suppress(asyncio.CancelledError):
                    await look_up_for_ever()
        return await two_turns(session)

    over = threading.Event()
    try:
        assert_faulty_alone(Rollouts(stubborn).run())
    finally:
        over.set()


def test_time_of_the_engine_does_not_count() -> None:
    clock = MovedClock()

    class Slow(FakeEngine):
        def answers(self, requests):  # type: ignore[no-untyped-def]
            for answer in super().answers(requests):
                clock.move(10 * TIMEOUT_S)
                yield answer

    async def uses_a_tool(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        clock.move(TIMEOUT_S * 0.1)
        await session.generate()
        clock.move(TIMEOUT_S * 0.1)
        return session.finish(await session.score())

    found = Rollouts(uses_a_tool, Slow(), clock=clock).run()
    assert [trajectory.fault for trajectory in found] == [None] * 3


def test_waits_of_several_turns_add_up() -> None:
    async def waits_twice(session: Session, clock: MovedClock) -> Trajectory:
        for _ in range(2):
            await session.generate()
            if is_faulty(session):
                clock.move(TIMEOUT_S * 0.6)
        return await two_turns(session)

    found = Rollouts(waits_twice).run()
    assert [trajectory.fault for trajectory in found] == [None, Fault.TIMEOUT, None]


def test_null_is_no_limit() -> None:
    async def takes_long(session: Session, clock: MovedClock) -> Trajectory:
        clock.move(FOR_EVER_S)
        await asyncio.sleep(0.3)
        return await two_turns(session)

    assert [found.fault for found in Rollouts(takes_long, timeout_s=None).run()] == [None] * 3


@pytest.mark.full
def test_who_is_waited_for_is_reported_again_and_again_but_ever_less_often() -> None:
    async def waits(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        if is_faulty(session):
            for _ in range(4):
                clock.move_soon(QUIET_S + 1)
                await asyncio.to_thread(time.sleep, 0.5)  # of a real clock
        return await two_turns(session)

    rollouts = Rollouts(waits)
    rollouts.run()
    assert len(rollouts.reported) == 3, rollouts.reported  # after 10, 20 and 40 seconds
    assert rollouts.reported[0].startswith(
        "rollouts: no progress for 11 s; 2 of 3 trajectories have ended or wait for running ones; running: train:1,"
        " response 1 of 1 (11 of 600 s, at test_rollout_limits.py:"
    )
    assert rollouts.reported[0].endswith(" in waits)")


def test_a_request_to_stop_gives_up_rollouts_that_make_no_progress() -> None:
    async def hangs(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        if is_faulty(session):
            rollouts.stop = "SIGTERM"
            clock.move_soon(STOP_GRACE_S + 1)
            await look_up_for_ever()
        return await two_turns(session)

    rollouts = Rollouts(hangs, timeout_s=None)
    with pytest.raises(RolloutsGivenUpError) as error:
        rollouts.run()
    expected = (
        "SIGTERM: rollouts are given up, as no trajectory has made progress for 10 s; waited for train:1, response 1"
        " of 1"
    )
    assert str(error.value).startswith(expected)
    assert str(error.value) in rollouts.reported


def test_a_request_to_stop_waits_for_rollouts_that_go_on() -> None:
    async def goes_on(session: Session, clock: MovedClock) -> Trajectory:
        rollouts.stop = "SIGTERM"
        for _ in range(4):
            clock.move_soon(STOP_GRACE_S - 1)
            await asyncio.sleep(0.2)
            await session.generate()
        return session.finish(Score(1.0, is_correct=True))

    rollouts = Rollouts(goes_on)
    assert len(rollouts.run(num_prompts=1)) == 1


def test_many_trajectories_are_looked_at_less_often() -> None:
    """A look costs as much as there are: at 32,768 it took 80 of the 100 ms between two."""
    assert [check_s(number) for number in (1, 4096, 8192, 32_768)] == [0.1, 0.1, 0.2, 0.8]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollout functions that hang or block: they cost their trajectory, are reported, and give way to a request to stop."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts import limits as limits_module
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.limits import (
    BLOCKED_S,
    QUIET_S,
    STOP_GRACE_S,
    STUBBORN_S,
    RolloutLimits,
    RolloutsGivenUpError,
)
from nemo_rl_moe.rollouts.pool import check_s
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_worker, prompts

FOR_EVER_S = 3600.0
TIMEOUT_S = 600.0


@dataclass
class MovedClock:
    """A clock that goes forward when a test moves it."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def move(self, seconds: float) -> None:
        self.seconds += seconds

    def move_soon(self, seconds: float) -> None:
        """Moves it while everything waits."""
        asyncio.get_running_loop().call_later(0.02, self.move, seconds)


@dataclass
class Rollouts:
    """Rollouts of one function of a session under a moved clock.

    Attributes:
        function: Drives the trajectories; gets the clock too.
        engine: Generates.
        stop: Request to stop.
        timeout_s: Limit of a trajectory.
        reported: All messages and warnings.
        ends: Texts with which the process would have been ended.
    """

    function: Callable[[Session, MovedClock], Awaitable[Trajectory]]
    engine: FakeEngine = field(default_factory=FakeEngine)
    stop: str | None = None
    timeout_s: float | None = TIMEOUT_S
    clock: MovedClock = field(default_factory=MovedClock)
    reported: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def run(self, num_prompts: int = 3) -> list[Trajectory]:
        async def rollout(session: Session) -> Trajectory:
            return await self.function(session, self.clock)

        limits = RolloutLimits(
            self.timeout_s,
            "tools:use_tools",
            lambda: self.stop,
            self.reported.append,
            self.reported.append,
            self.clock,
            self.ends.append,
        )
        worker = make_worker(self.engine, FakeRewardFunction(), RolloutFunction(rollout, "tools:use_tools"))
        return replace(worker, limits=limits).run(prompts(num_prompts), 1, SAMPLING, (3, 1), PhaseClock())


def is_faulty(session: Session) -> bool:
    return session.prompt.sample_id == "train:1"


def assert_faulty_alone(found: list[Trajectory], place: str) -> None:
    assert [trajectory.fault for trajectory in found] == [None, Fault.TIMEOUT, None]
    assert found[1].fault_message.startswith("took longer than env.rollout_timeout_s=600 (at test_rollout_limits.py:")
    assert found[1].fault_message.endswith(f" in {place})")
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

    assert_faulty_alone(Rollouts(hangs).run(), "look_up_for_ever")
    assert cancelled == ["train:1"], "its code hears of it"


def test_t18_code_that_blocks_the_thread_of_all_costs_its_trajectory_alone() -> None:
    def look_up_synchronously(clock: MovedClock) -> None:
        clock.move(TIMEOUT_S + 1)
        time.sleep(FOR_EVER_S)

    async def blocks(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        if is_faulty(session):
            with suppress(Exception):  # as careful code does
                look_up_synchronously(clock)
        return await two_turns(session)

    rollouts = Rollouts(blocks)
    assert_faulty_alone(rollouts.run(), "look_up_synchronously")
    (blocking,) = [text for text in rollouts.reported if "main thread" in text]
    assert blocking.startswith("env.driver: tools:use_tools has kept the run's main thread for 601 s (train:1,")
    assert "asyncio.to_thread" in blocking
    assert "time.sleep(FOR_EVER_S)" in blocking, "its stack"
    assert "asyncio/" not in blocking, "and nothing above it"
    assert not rollouts.ends


def test_a_task_that_a_function_starts_counts_for_it() -> None:
    async def blocks_in_a_task(session: Session, clock: MovedClock) -> Trajectory:
        async def tool() -> None:
            clock.move(TIMEOUT_S + 1)
            time.sleep(FOR_EVER_S)

        await session.generate()
        if is_faulty(session):
            await asyncio.gather(tool(), asyncio.sleep(0))
        return await two_turns(session)

    assert_faulty_alone(Rollouts(blocks_in_a_task).run(), "tool")


def test_code_that_cannot_be_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_moe.rollouts.pool.CLEANUP_S", 0.1)

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
        assert_faulty_alone(Rollouts(stubborn).run(), "look_up_for_ever")
    finally:
        over.set()


def test_time_of_the_engine_and_of_other_trajectories_does_not_count() -> None:
    clock = MovedClock()

    class Slow(FakeEngine):
        def answers(self, requests):  # type: ignore[no-untyped-def]
            for answer in super().answers(requests):
                clock.move(10 * TIMEOUT_S)
                yield answer

    async def uses_a_tool(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        clock.move(TIMEOUT_S * 0.4)  # its own code keeps the thread, and the others wait
        await asyncio.sleep(0.03)  # while the engine answers others, too
        await session.generate()
        clock.move(TIMEOUT_S * 0.4)
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


def test_code_that_does_not_let_itself_be_interrupted_ends_the_process() -> None:
    async def takes_no_hint(session: Session, clock: MovedClock) -> Trajectory:
        clock.move(TIMEOUT_S + STUBBORN_S + 1)
        deadline = time.monotonic() + 60
        while not rollouts.ends and time.monotonic() < deadline:
            with suppress(BaseException):
                time.sleep(0.05)
        return await two_turns(session)

    rollouts = Rollouts(takes_no_hint)
    rollouts.run(num_prompts=1)
    assert rollouts.ends[0].startswith(
        "env.driver: tools:use_tools keeps the run's main thread for 631 s and does not let itself be interrupted"
        " (train:0, response 1 of 1, at test_rollout_limits.py:"
    )


def test_a_request_to_stop_waits_for_no_code_in_a_thread_where_nothing_interrupts_it() -> None:
    """Of asynchronous rollouts: the process ends `STOP_GRACE_S` after the request."""

    async def blocks(session: Session, clock: MovedClock) -> Trajectory:
        rollouts.stop = "SIGTERM"
        deadline = time.monotonic() + 60
        while not rollouts.ends and time.monotonic() < deadline:
            time.sleep(1.0)  # the watcher has to see the request before the clock moves
            if clock.seconds + STOP_GRACE_S + 1 < STUBBORN_S:
                clock.move(STOP_GRACE_S + 1)
        rollouts.stop = None
        return await two_turns(session)

    rollouts = Rollouts(blocks, timeout_s=None)
    thread = threading.Thread(target=lambda: rollouts.run(num_prompts=1))
    thread.start()
    thread.join()
    assert "tools:use_tools keeps the thread of all rollouts for " in rollouts.ends[0]


@pytest.mark.full
def test_who_is_waited_for_is_reported_again_and_again_but_ever_less_often() -> None:
    async def waits(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        if is_faulty(session):
            for _ in range(4):
                clock.move_soon(QUIET_S + 1)
                await asyncio.sleep(1.0)
        return await two_turns(session)

    rollouts = Rollouts(waits)
    rollouts.run()
    assert len(rollouts.reported) == 3, rollouts.reported  # after 10, 20 and 40 seconds
    assert rollouts.reported[0].startswith(
        "rollouts: no progress for 11 s; 2 of 3 trajectories have ended or wait for the others; running: train:1,"
        " response 1 of 1 (11 of 600 s, at test_rollout_limits.py:"
    )
    assert rollouts.reported[0].endswith(" in waits)")


def test_short_calls_that_block_are_not_reported() -> None:
    async def blocks_a_little(session: Session, clock: MovedClock) -> Trajectory:
        clock.move(BLOCKED_S - 1)
        time.sleep(2 * limits_module.POLL_S)
        return await two_turns(session)

    rollouts = Rollouts(blocks_a_little)
    rollouts.run(num_prompts=1)
    assert rollouts.reported == []


@pytest.mark.parametrize("blocks", [False, True])
def test_a_request_to_stop_gives_up_rollouts_that_make_no_progress(blocks: bool) -> None:
    async def hangs(session: Session, clock: MovedClock) -> Trajectory:
        await session.generate()
        if is_faulty(session):
            rollouts.stop = "SIGTERM"
            clock.move_soon(STOP_GRACE_S + 1)
            if blocks:
                threading.Timer(1.0, clock.move, [STOP_GRACE_S + 1]).start()
                time.sleep(FOR_EVER_S)
            await look_up_for_ever()
        return await two_turns(session)

    rollouts = Rollouts(hangs, timeout_s=None)
    with pytest.raises(RolloutsGivenUpError) as error:
        rollouts.run()
    expected = (
        "SIGTERM: rollouts are given up, as no trajectory has gone on for 10 s; waited for train:1, response 1 of 1"
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

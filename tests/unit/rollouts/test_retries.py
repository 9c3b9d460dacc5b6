# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Failed trajectories that are tried once more: in a fresh session, counted, and left as they are after that."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.running import seed_of_attempt
from nemo_rl_moe.rollouts.trajectory import RETRIES_METRIC, Trajectory, rollout_metrics
from tests.support.clocks_and_disks import MovedClock
from tests.support.grpo_fakes import (
    SAMPLING,
    FakeEngine,
    FakeRewardFunction,
    as_numbers,
    from_numbers,
    make_runner,
    prompts,
)
from tests.support.grpo_inputs import assert_same_trajectories

FAULTY = "train:1"


@dataclass
class Flaky:
    """A rollout function whose first sessions of one prompt fail.

    Attributes:
        num_failures: So many of its sessions fail.
        hangs: They hang in place of raising.
    """

    num_failures: int
    hangs: bool = False
    sessions: list[Session] = field(default_factory=list)
    clock: MovedClock = field(default_factory=MovedClock)

    async def __call__(self, session: Session) -> Trajectory:
        await session.generate()
        if session.prompt.sample_id == FAULTY:
            assert len(session.turns) == 1, "a fresh session"
            self.sessions.append(session)
            if len(self.sessions) <= self.num_failures:
                await self._fail()
        return session.finish(await session.score())

    async def _fail(self) -> None:
        if not self.hangs:
            raise OSError("the tool is away")
        self.clock.move_soon(601.0)
        await asyncio.Event().wait()


def run(flaky: Flaky, num_attempts: int) -> list[Trajectory]:
    driver = RolloutFunction(flaky, "tools:flaky")
    settings: dict[str, Any] = {"timeout_s": 600.0, "num_attempts": num_attempts}
    runner = make_runner(FakeEngine(), FakeRewardFunction(), driver, loop=CallersLoop(flaky.clock.loop()), **settings)
    return runner.evaluate(prompts(3), 1, SAMPLING, (3, 1))


@pytest.mark.parametrize("hangs", [False, True])
def test_a_second_attempt_stands_in_for_a_failed_one(hangs: bool) -> None:
    flaky = Flaky(1, hangs)
    found = run(flaky, 2)
    assert [trajectory.fault for trajectory in found] == [None, None, None]
    assert [trajectory.num_retries for trajectory in found] == [0, 1, 0]
    first, second = flaky.sessions
    assert second.seed == seed_of_attempt(first.seed, 1) != first.seed
    assert second.group_id == first.group_id == found[1].group_id
    assert rollout_metrics(found)[RETRIES_METRIC] == 1


def test_the_others_are_those_of_a_run_without_failures() -> None:
    found, healthy = run(Flaky(1), 2), run(Flaky(0), 2)
    for number in (0, 2):
        assert_same_trajectories([found[number]], [healthy[number]])
    assert RETRIES_METRIC not in rollout_metrics(healthy)


def test_what_fails_twice_keeps_its_fault() -> None:
    flaky = Flaky(2)
    found = run(flaky, 2)
    assert [trajectory.fault for trajectory in found] == [None, Fault.ERROR, None]
    assert found[1].num_retries == 1
    assert len(flaky.sessions) == 2
    assert "the tool is away" in found[1].fault_message


def test_without_a_second_attempt_there_is_one() -> None:
    flaky = Flaky(1)
    assert [trajectory.num_retries for trajectory in run(flaky, 1)] == [0, 0, 0]
    assert len(flaky.sessions) == 1


def test_a_score_that_fails_is_tried_again_with_another_response() -> None:
    scores = [Score(0.0, is_correct=False, fault=Fault.DIED, message="gone"), Score(1.0, is_correct=True)]

    class OfTurns(FakeRewardFunction):
        def score(self, items):  # type: ignore[no-untyped-def]
            return [scores.pop(0) for _ in items]

    runner = make_runner(FakeEngine(), OfTurns(), num_attempts=2)
    (found,) = runner.evaluate(prompts(1), 1, SAMPLING, (3, 1))
    assert (found.reward, found.fault, found.num_retries) == (1.0, None, 1)
    assert not scores


def test_each_environment_has_its_own_number_of_attempts() -> None:
    flaky = Flaky(1)
    environments = {
        name: RunEnvironment(RolloutFunction(flaky, "tools:flaky"), FakeRewardFunction(), num_attempts=number)
        for name, number in (("once", 1), ("twice", 2))
    }
    for name, number in (("once", 1), ("twice", 2)):
        flaky.sessions.clear()
        mixed = [replace(prompt, environment=name) for prompt in prompts(3)]
        runner = RolloutRunner(FakeEngine(), environments, as_numbers, from_numbers, 100, CallersLoop())
        found = runner.evaluate(mixed, 1, SAMPLING, (3, 1))
        assert len(flaky.sessions) == number
        assert [each.fault for each in found] == [None, Fault.ERROR if number == 1 else None, None]


def test_attempts_have_seeds_of_their_own() -> None:
    assert seed_of_attempt(7, 0) == 7
    assert len({seed_of_attempt(seed, attempt) for seed in range(20) for attempt in range(5)}) == 100

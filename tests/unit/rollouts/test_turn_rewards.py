# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards that an environment gives for turns: their sum, their tokens, slips; and the limits that end a trajectory."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest

from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.trajectory import KEPT_MASS, Trajectory, group_turn_rewards, rollout_metrics
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_runner, prompts, trajectory
from tests.support.grpo_inputs import only_sequence, tokens_of, with_tokens

Rollout = Callable[[Session], Awaitable[Trajectory]]


def run(
    function: Rollout, weights: Mapping[str, float] | None = None, timeout_s: float | None = None
) -> list[Trajectory]:
    driver = RolloutFunction(function, "mine")
    runner = make_runner(FakeEngine(), FakeRewardFunction(), driver, reward_weights=weights, timeout_s=timeout_s)
    return runner.evaluate(prompts(1), 2, SAMPLING, (0,))


async def three_turns(session: Session) -> Trajectory:
    await session.generate()
    session.append([3])
    await session.generate()
    session.reward(0.5)
    session.reward(-2.0)
    session.append([3])
    await session.generate()
    session.reward(0.25)
    return session.finish(Score(1.0, is_correct=True))


def test_the_reward_of_a_trajectory_is_the_sum_of_its_turns_and_its_score() -> None:
    for found in run(three_turns):
        assert found.turn_rewards == (0.0, -1.5, 0.25)
        assert found.reward == 1.0 - 1.5 + 0.25
        assert len(found.turn_lengths) == found.num_turns == 3
        assert sum(found.turn_lengths) == found.num_sampled_tokens == only_sequence(found).loss_mask.sum()
        assert found.is_correct
        assert found.fault is None


def test_weighted_rewards_by_name_come_beside_those_of_turns() -> None:
    async def named(session: Session) -> Trajectory:
        await session.generate()
        session.reward(0.5)
        return session.finish(Score.named({"won": 1.0}, is_correct=True))

    for found in run(named, {"won": 3.0}):
        assert (found.reward, dict(found.rewards)) == (3.5, {"won": 1.0})


def test_without_rewards_of_turns_there_are_none() -> None:
    async def plain(session: Session) -> Trajectory:
        await session.generate()
        return session.finish(await session.score())

    found = run(plain)
    assert {each.turn_rewards for each in found} == {()}
    assert "mean_turn_rewards_per_sample" not in rollout_metrics(found)


async def too_early(session: Session) -> Trajectory:
    session.reward(1.0)
    raise AssertionError("it has raised")


def of_amount(amount: float) -> Rollout:
    async def rewarded(session: Session) -> Trajectory:
        await session.generate()
        session.reward(1.0)
        session.reward(amount)
        return session.finish(Score(1.0, is_correct=True))

    return rewarded


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (too_early, "RuntimeError: a reward was given before the first response; await session.generate() first"),
        (of_amount(float("nan")), "ValueError: a turn's reward is nan, expected a number from -1,000,000 to 1,000,000"),
        (of_amount(float("-inf")), "ValueError: a turn's reward is -inf, expected a number from -1,000,000"),
        (of_amount(1e6), "ValueError: the reward with those of its turns is 1000002.0, expected a number from"),
    ],
)
def test_a_slip_is_a_fault_of_its_trajectory_and_leaves_no_reward(function: Rollout, message: str) -> None:
    for found in run(function):
        assert found.fault is Fault.ERROR
        assert found.fault_message.startswith(message)
        assert (found.reward, found.turn_rewards) == (0.0, ())


def test_rewards_of_a_group_have_a_place_for_each_turn() -> None:
    two = replace(trajectory(), turn_lengths=(1, 1), turn_rewards=(1.0, 2.0))
    found = group_turn_rewards([two, trajectory(), replace(two, turn_lengths=(1, 1, 1), turn_rewards=()), two], 2)
    assert found.tolist() == [[[1, 2, 0], [0, 0, 0]], [[0, 0, 0], [1, 2, 0]]]


class TestTruncation:
    def test_by_time(self) -> None:
        async def hangs(session: Session) -> Trajectory:
            await session.generate()
            session.reward(1.0)
            await asyncio.sleep(3600)
            raise AssertionError("it is cancelled before")

        found = run(hangs, timeout_s=0.3)
        assert {each.finish_reason for each in found} == {"time"}
        assert {(each.fault, each.reward, each.turn_rewards) for each in found} == {(Fault.TIMEOUT, 0.0, ())}
        metrics = rollout_metrics(found)
        assert (metrics["truncation_rate"], metrics["truncation_rate_by_time"]) == (0.0, 1.0)

    def test_rates_are_of_all_trajectories(self) -> None:
        reasons = ("stop", "length", "turns", "turns", "time")
        found = [replace(trajectory(), finish_reason=reason) for reason in reasons]  # type: ignore[arg-type]
        metrics = rollout_metrics(found)
        assert metrics["truncation_rate"] == 1 / 5
        assert metrics["truncation_rate_by_turns"] == 2 / 5
        assert metrics["truncation_rate_by_time"] == 1 / 5
        assert not [name for name in rollout_metrics([trajectory()]) if "_by_" in name]
        turns = rollout_metrics([replace(trajectory(), num_turns=2)])
        assert turns["truncation_rate_by_turns"] == turns["truncation_rate_by_time"] == 0.0


def test_the_kept_mass_is_a_mean_over_tokens_and_other_metrics_are_means_over_trajectories() -> None:
    """One token that kept 0.4, and nine that kept 0.9 each: a mean of the two means would say 0.65."""
    found = [
        replace(
            with_tokens(trajectory(), tokens_of([9], [5] * size)), metrics={KEPT_MASS: mass, "env/calls": float(size)}
        )
        for size, mass in ((1, 0.4), (9, 0.9))
    ]
    metrics = rollout_metrics([*found, trajectory()])
    assert metrics[KEPT_MASS] == pytest.approx(0.85)
    assert metrics["env/calls"] == 5.0

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories of several environments in one call: each is driven, scored, limited and watched by its own."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from nemo_rl_moe.algorithms.grpo_metrics import Validator, group_metrics
from nemo_rl_moe.data.mixture import MixtureLoader
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.errors import RewardWorkersFailedError
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.environment import Environment, Session, SingleTurn
from nemo_rl_moe.rollouts.faults import FaultWatch
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.rollout_function import RolloutFunction
from nemo_rl_moe.rollouts.run_environment import RunEnvironment, watch_trajectories
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import (
    LEAVE_OUT,
    SAMPLING,
    FakeEngine,
    as_numbers,
    from_numbers,
    groups_of_step,
    make_source,
    prompts,
    small_config,
    trajectory,
)


@dataclass
class Named:
    """Scores by the environment's own number, and notes whose items it got."""

    reward: float
    names: list[str]

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        self.names += [item.environment for item in items]
        return [Score(self.reward + index / 100, is_correct=self.reward >= 1) for index in range(len(items))]


async def twice(session: Session) -> Trajectory:
    await session.generate()
    session.append([3])
    await session.generate()
    return session.finish(await session.score(), {"tools/calls": 2.0})


async def sleepy(session: Session) -> Trajectory:
    await session.generate()
    await asyncio.sleep(3600)
    raise AssertionError("it is cancelled before")


def mixed_prompts() -> list[Prompt]:
    """Return five prompts of two environments, by turns."""
    return [replace(prompt, environment=("plain", "turns")[index % 2]) for index, prompt in enumerate(prompts(5))]


def runner_of(plain: RunEnvironment, turns: RunEnvironment) -> RolloutRunner:
    environments = {"plain": plain, "turns": turns}
    return RolloutRunner(FakeEngine(), environments, as_numbers, from_numbers, 100, CallersLoop())


TWICE = RolloutFunction(twice, "twice")


def mixed_runner(plain: Named, turns: Named) -> RolloutRunner:
    return runner_of(RunEnvironment(SingleTurn(), plain), RunEnvironment(TWICE, turns))


def test_each_trajectory_has_the_driver_and_the_score_of_its_environment() -> None:
    plain, turns = Named(0.0, []), Named(1.0, [])
    found = mixed_runner(plain, turns).evaluate(mixed_prompts(), 2, SAMPLING, (0,))
    assert [each.environment for each in found] == ["plain", "plain", "turns", "turns"] * 2 + ["plain", "plain"]
    assert [each.num_turns for each in found] == [1, 1, 2, 2] * 2 + [1, 1]
    # In the order of the items of each, whatever lay between them.
    assert [each.reward for each in found if each.environment == "plain"] == [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert [each.reward for each in found if each.environment == "turns"] == [1.0, 1.01, 1.02, 1.03]
    assert (set(plain.names), set(turns.names)) == ({"plain"}, {"turns"})


def test_groups_are_never_mixed() -> None:
    mixture = [f"+env.mixture.{name}={{weight: 1.0}}" for name in ("plain", "turns")]
    config = small_config("grpo.max_num_epochs=3", "grpo.num_prompts_per_step=4", *mixture)
    datasets = {name: [each for each in mixed_prompts() if each.environment == name] for name in ("plain", "turns")}
    loader = MixtureLoader(datasets, {"plain": 1.0, "turns": 1.0}, 4, 0, shuffle=True)
    source = make_source(config, mixed_runner(Named(0.0, []), Named(1.0, [])), loader)
    step = 0
    while not source.is_used_up:
        groups = groups_of_step(source, step)
        step += 1
        for start in range(0, len(groups.trained), groups.num_generations):
            group = groups.trained[start : start + groups.num_generations]
            assert len({(each.environment, each.group_id, each.sample_id) for each in group}) == 1
        # Two prompts of each in a step, though one environment has three and the other two.
        assert [each.environment for each in groups.trained].count("plain") == len(groups.trained) / 2


def test_a_time_limit_is_that_of_the_environment() -> None:
    driver: Environment = RolloutFunction(sleepy, "sleepy")
    plain = RunEnvironment(driver, Named(0.0, []), timeout_s=0.3)
    runner = runner_of(plain, RunEnvironment(TWICE, Named(1.0, [])))
    found = runner.evaluate(mixed_prompts()[:2], 1, SAMPLING, (0,))
    assert [each.fault for each in found] == [Fault.TIMEOUT, None]
    assert "env.rollout_timeout_s=0.3" in found[0].fault_message


def test_rewards_by_name_are_those_of_the_environment() -> None:
    @dataclass
    class Several:
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            return [Score.named({"won": 1.0}, is_correct=True) for _ in items]

    turns = RunEnvironment(TWICE, Several(), reward_weights={"won": 3.0})
    runner = runner_of(RunEnvironment(SingleTurn(), Named(0.5, [])), turns)
    found = runner.evaluate(mixed_prompts()[:2], 1, SAMPLING, (0,))
    assert [(each.reward, dict(each.rewards)) for each in found] == [(0.5, {}), (3.0, {"won": 1.0})]
    metrics = group_metrics(RolloutGroups(found, found, 1, 0), LEAVE_OUT)
    assert metrics["rewards/won/mean"] == 1.0, "of those that can have it"
    assert "env/plain/rewards/won/mean" not in metrics


def watch_of(name: str, lines: list[str], max_failed: int = 2) -> FaultWatch:
    return FaultWatch(
        max_failed,
        score_truncated=True,
        on_failure="leave_out",
        warn=lines.append,
        environment=f"the environment {name}",
    )


def test_an_environment_that_fails_alone_is_not_hidden_by_the_others() -> None:
    lines: list[str] = []
    environments = {
        name: RunEnvironment(SingleTurn(), Named(0.0, []), watch_of(name, lines)) for name in ("plain", "turns")
    }
    well = replace(trajectory(reward=1.0), environment="plain")
    failed = replace(trajectory(fault=Fault.ERROR), environment="turns")
    watch_trajectories(environments, [well, failed])
    watch_trajectories(environments, [well, well])  # a step without the other one says nothing of it
    with pytest.raises(RewardWorkersFailedError, match="the environment turns scored no response of a step or valid"):
        watch_trajectories(environments, [well, failed])


class TestMetrics:
    def made(self) -> list[Trajectory]:
        plain = [
            replace(trajectory(reward=reward, is_correct=reward > 0), environment="plain") for reward in (0.0, 1.0)
        ]
        turns = [
            replace(trajectory(reward=reward), environment="turns", num_turns=turns, metrics={"tools/calls": calls})
            for reward, turns, calls in ((3.0, 2, 4.0), (3.0, 4, 0.0))
        ]
        failed = [replace(trajectory(fault=Fault.DIED), environment="turns") for _ in range(2)]
        return [*plain, *turns, *failed]

    def test_are_those_of_its_own_groups(self) -> None:
        found = self.made()
        metrics = group_metrics(RolloutGroups(found, found, 2, 0), LEAVE_OUT)
        own = {key: value for key, value in metrics.items() if key.startswith(("env/plain/", "env/turns/"))}
        assert own["env/plain/reward"] == 0.5
        assert own["env/turns/reward"] == 3.0, "failures count in none"
        assert own["env/plain/accuracy"] == 0.5
        assert own["env/turns/accuracy"] == 0.0
        assert (own["env/plain/share"], own["env/turns/share"]) == (2 / 6, 4 / 6)
        assert own["env/turns/mean_turns_per_sample"] == (2 + 4 + 1 + 1) / 4
        assert own["env/turns/tools/calls"] == 2.0
        assert (own["env/plain/num_died"], own["env/turns/num_died"]) == (0.0, 2.0)
        assert own["env/turns/failed_share"] == 0.5
        assert own["env/turns/num_groups_left_out"] == 1.0
        assert (own["env/plain/frac_zero_std_groups"], own["env/turns/frac_zero_std_groups"]) == (0.0, 1.0)
        assert not [key for key in own if "env/env/" in key or "/env/num" in key.removeprefix("env/")]
        # Those of the step are as they were.
        assert metrics["env/num_died"] == 2.0
        assert metrics["reward"] == (0.0 + 1.0 + 3.0 + 3.0) / 4

    def test_of_a_run_with_one_environment_there_are_none(self) -> None:
        found = [replace(each, environment="") for each in self.made()]
        metrics = group_metrics(RolloutGroups(found, found, 2, 0), LEAVE_OUT)
        assert not [key for key in metrics if key.startswith("env//") or key.count("/") > 2]
        assert "env/share" not in metrics

    def test_an_environment_whose_groups_were_all_replaced_has_a_share_of_nothing(self) -> None:
        found = self.made()
        metrics = group_metrics(RolloutGroups(found[:2], found, 2, 0), LEAVE_OUT)
        assert (metrics["env/plain/share"], metrics["env/turns/share"]) == (1.0, 0.0)
        assert torch.tensor(metrics["env/turns/reward"]).isfinite()

    def test_of_validation_are_by_environment_too(self) -> None:
        runner = mixed_runner(Named(0.0, []), Named(1.0, []))
        validate = Validator(small_config().grpo, runner, mixed_prompts(), SAMPLING, LEAVE_OUT)
        metrics = validate()
        assert (metrics["val/env/plain/accuracy"], metrics["val/env/turns/accuracy"]) == (0.0, 1.0)
        assert metrics["val/env/turns/pass_at_2"] == 1.0
        assert metrics["val/accuracy"] == pytest.approx(4 / 10)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which groups a step trains on, without and with dynamic sampling."""

import asyncio
from collections.abc import Sequence

import pytest

from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import (
    FakeEngine,
    FakeRewardFunction,
    groups_of_step,
    make_runner,
    make_source,
    prompts,
    small_config,
)
from tests.support.scripted_rollouts import ScriptedEngine

DYNAMIC = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_groups=8")
NAMED = (
    *("env.reward.kind=callable", "env.reward.function=package.module:function"),
    "env.reward_weights={up: 1.0, down: 1.0, logged: 0.0}",
)


class RewardFunctionOfPrompts(FakeRewardFunction):
    """Of the responses to some prompts the first is right; those to all others are worth the same."""

    def __init__(self, informative: set[int]):
        seen: dict[str, int] = {}

        def reward(item: ScoringItem) -> float:
            seen[item.sample_id] = seen.get(item.sample_id, 0) + 1
            teaches = int(item.record["answer"]) in informative
            return float(teaches and seen[item.sample_id] == 1)

        super().__init__(reward)


def source_of(runner: RolloutRunner, *overrides: str, num_prompts: int = 12) -> SampledGroups:
    loader = PromptLoader(prompts(num_prompts), 2, seed=0, shuffle=False)
    return make_source(small_config("grpo.max_num_epochs=1", *overrides), runner, loader)


def collect(
    informative: set[int], *overrides: str, num_prompts: int = 12, engine: FakeEngine | None = None
) -> tuple[RolloutGroups, SampledGroups]:
    runner = make_runner(engine or FakeEngine(), RewardFunctionOfPrompts(informative))
    source = source_of(runner, *overrides, num_prompts=num_prompts)
    return groups_of_step(source, 0), source


def next_prompts(source: SampledGroups) -> list[str]:
    groups = groups_of_step(source, 1)
    return sorted({found.sample_id for found in groups.generated}, key=lambda name: int(name.split(":")[1]))[:2]


def answer_of(found: Trajectory) -> int:
    return int(found.sample_id.split(":")[1])


def trained(groups: RolloutGroups) -> list[int]:
    """The prompt of each trained group; every group is whole."""
    answers = [answer_of(found) for found in groups.trained]
    assert answers == [answer for answer in answers[::3] for _ in range(3)]
    return answers[::3]


def test_without_dynamic_sampling_groups_are_taken_as_they_come() -> None:
    groups, stream = collect(set())
    assert trained(groups) == [0, 1]
    assert groups.generated == groups.trained
    assert (groups.num_generations, groups.num_batches, groups.num_filled) == (3, 1, 0)
    assert next_prompts(stream) == ["train:2", "train:3"]


def test_informative_groups_are_not_replaced() -> None:
    groups, stream = collect({0, 1, 2}, *DYNAMIC)
    assert trained(groups) == [0, 1]
    assert (groups.num_batches, groups.num_filled) == (1, 0)
    assert next_prompts(stream) == ["train:2", "train:3"], "no prompt is wasted"


def test_each_uninformative_group_is_replaced_by_one() -> None:
    groups, stream = collect({1, 5}, *DYNAMIC)
    assert trained(groups) == [1, 5]
    assert (groups.num_batches, groups.num_filled) == (3, 0)
    assert [answer_of(found) for found in groups.generated][::3] == [0, 2, 3, 4, 1, 5]
    assert next_prompts(stream) == ["train:6", "train:7"]


def test_no_more_are_generated_than_needed() -> None:
    groups, _ = collect({1, 2, 3}, *DYNAMIC)
    assert trained(groups) == [1, 2]
    assert (groups.num_batches, groups.num_filled, len(groups.generated)) == (1.5, 0, 9)


def test_at_the_bound_groups_are_taken_as_they_come() -> None:
    groups, stream = collect({6, 9}, *DYNAMIC)
    assert trained(groups) == [6, 7]
    assert (groups.num_batches, groups.num_filled) == (4, 1)
    groups, _ = collect(set(), *DYNAMIC)
    assert trained(groups) == [6, 7]
    assert (groups.num_batches, groups.num_filled, len(groups.generated)) == (4, 2, 24)
    assert not stream.is_used_up


def test_the_bound_is_one_of_each_step() -> None:
    _, stream = collect(set(), *DYNAMIC, num_prompts=20)
    groups = groups_of_step(stream, 1)
    assert trained(groups) == [14, 15]
    assert (groups.num_batches, groups.num_filled) == (4, 2)


def test_fills_up_when_the_prompts_end() -> None:
    groups, stream = collect({3}, *DYNAMIC, num_prompts=5)
    assert stream.is_used_up
    assert trained(groups) == [2, 3]
    assert (groups.num_batches, groups.num_filled) == (2, 1)


def test_groups_whose_responses_have_all_failed_are_replaced() -> None:
    class FailsForSome(RewardFunctionOfPrompts):
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            failed = Score(0.0, is_correct=False, fault=Fault.ERROR, message="away")
            scores = super().score(items)
            return [failed if item.sample_id == "train:0" else score for item, score in zip(items, scores, strict=True)]

    source = source_of(make_runner(FakeEngine(), FailsForSome({0, 1, 2})), *DYNAMIC)
    groups = groups_of_step(source, 0)
    assert trained(groups) == [1, 2]
    assert {found.fault for found in groups.generated[:3]} == {Fault.ERROR}


def test_seeds_differ_in_every_group_and_step() -> None:
    engine = FakeEngine()
    _, source = collect(set(), *DYNAMIC, num_prompts=20, engine=engine)
    groups_of_step(source, 1)
    seeds = [seed for request in engine.requests for seed in request.seeds]
    assert len(engine.requests) == 8
    assert len(set(seeds)) == len(seeds) == 8 * 6


def test_seeds_depend_on_the_configured_one() -> None:
    engine = FakeEngine()
    for seed in (11, 11, 12):
        collect({0, 1}, f"grpo.seed={seed}", engine=engine)
    first, again, other = (request.seeds for request in engine.requests)
    assert first == again
    assert set(first).isdisjoint(other)


def test_phases_of_all_rounds_count() -> None:
    engine, clock = FakeEngine(), PhaseClock()
    groups = groups_of_step(source_of(make_runner(engine, RewardFunctionOfPrompts(set())), *DYNAMIC), 0, clock)
    metrics = clock.metrics()
    generated = metrics["timing/generation/tokens_per_second"] * metrics["timing/generation/seconds"]
    assert round(generated) == sum(found.num_sampled_tokens for found in groups.generated)


def test_error_of_one_group_does_not_wait_for_the_others() -> None:
    class Dying(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> GeneratedSequence:
            if len(self.seeds) > 3:
                raise RuntimeError("the engine is gone")
            self.seeds.append(request.seed)
            return await asyncio.get_running_loop().create_future()

    runner = make_runner(Dying(), FakeRewardFunction())
    source = source_of(runner)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        groups_of_step(source, 0)
    runner.close()


class RewardFunctionOfTwo(FakeRewardFunction):
    """Two rewards: to prompts with an even answer, of opposite sign, so that only each apart distinguishes
    responses."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        ups = [float(int(item.record["answer"]) % 2 == 0) * index for index, item in enumerate(items)]
        return [Score.named({"up": up, "down": -up, "logged": index}, is_correct=False) for index, up in enumerate(ups)]


def test_groups_are_distinguished_by_what_the_estimator_compares() -> None:
    """No group differs in the sum; those with even answers differ in each reward; one without weight does not count."""
    found = {}
    for name in ("grpo", "gdpo"):
        weights = {"up": 1.0, "down": 1.0, "logged": 0.0}
        worker = make_runner(FakeEngine(), RewardFunctionOfTwo(), reward_weights=weights)
        source = source_of(worker, *DYNAMIC, f"grpo.adv_estimator.name={name}", *NAMED)
        groups = groups_of_step(source, 0)
        found[name] = (trained(groups), groups.num_filled)
        assert {trajectory.reward for trajectory in groups.generated} == {0.0}
    assert found == {"gdpo": ([0, 2], 0), "grpo": ([6, 7], 2)}

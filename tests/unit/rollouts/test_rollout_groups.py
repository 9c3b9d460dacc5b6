# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which groups a step trains on, without and with dynamic sampling."""

from collections.abc import Sequence

from nemo_rl_moe.algorithms.grpo_batch import make_source
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.source import RolloutGroups, SynchronousSource
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.rollouts.worker import RolloutWorker
from tests.support.grpo_fakes import SAMPLING, FakeEngine, FakeRewardFunction, make_worker, prompts, small_config

DYNAMIC = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=4")
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


def source_of(worker: RolloutWorker, *overrides: str, num_prompts: int = 12) -> SynchronousSource:
    loader = PromptLoader(prompts(num_prompts), 2, seed=0, shuffle=False)
    config = small_config("grpo.max_num_epochs=1", *overrides)
    return make_source(config, worker, loader, SAMPLING)


def collect(
    informative: set[int], *overrides: str, num_prompts: int = 12, step: int = 0, engine: FakeEngine | None = None
) -> tuple[RolloutGroups, SynchronousSource]:
    worker = make_worker(engine or FakeEngine(), RewardFunctionOfPrompts(informative))
    source = source_of(worker, *overrides, num_prompts=num_prompts)
    return source.next(step, PhaseClock()), source


def next_prompts(source: SynchronousSource) -> list[str]:
    """The prompts that the next step begins with."""
    groups = source.next(99, PhaseClock())
    return list(dict.fromkeys(found.sample_id for found in groups.generated))[:2]


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
    assert (groups.num_generations, groups.num_rounds, groups.num_filled) == (3, 1, 0)
    assert next_prompts(stream) == ["train:2", "train:3"]


def test_enough_after_the_first_round() -> None:
    groups, stream = collect({0, 1, 2}, *DYNAMIC)
    assert trained(groups) == [0, 1]
    assert (groups.num_rounds, groups.num_filled) == (1, 0)
    assert next_prompts(stream) == ["train:2", "train:3"], "no prompt is wasted"


def test_enough_after_three_rounds() -> None:
    groups, _ = collect({1, 5}, *DYNAMIC)
    assert trained(groups) == [1, 5]
    assert (groups.num_rounds, groups.num_filled) == (3, 0)
    assert [answer_of(found) for found in groups.generated][::3] == [0, 1, 2, 3, 4, 5]


def test_more_than_needed_are_left_out() -> None:
    groups, _ = collect({1, 2, 3}, *DYNAMIC)
    assert trained(groups) == [1, 2]
    assert (groups.num_rounds, groups.num_filled, len(groups.generated)) == (2, 0, 12)


def test_gives_up_after_the_last_round_and_fills_up() -> None:
    groups, stream = collect({6, 9}, *DYNAMIC)
    assert trained(groups) == [6, 0], "the informative first, then the oldest of the others"
    assert (groups.num_rounds, groups.num_filled) == (4, 1)
    groups, _ = collect(set(), *DYNAMIC)
    assert trained(groups) == [0, 1]
    assert (groups.num_rounds, groups.num_filled, len(groups.generated)) == (4, 2, 24)
    assert not stream.is_used_up


def test_fills_up_when_the_prompts_end() -> None:
    groups, stream = collect({3}, *DYNAMIC, num_prompts=5)
    assert stream.is_used_up
    assert trained(groups) == [3, 0]
    assert (groups.num_rounds, groups.num_filled) == (2, 1)


def test_seeds_differ_in_every_round_and_step() -> None:
    engine = FakeEngine()
    for step in (0, 1):
        collect(set(), *DYNAMIC, step=step, engine=engine)
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
    groups = source_of(make_worker(engine, RewardFunctionOfPrompts(set())), *DYNAMIC).next(0, clock)
    metrics = clock.metrics()
    generated = metrics["timing/generation/tokens_per_second"] * metrics["timing/generation/seconds"]
    assert round(generated) == sum(found.num_sampled_tokens for found in groups.generated)


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
        worker = make_worker(FakeEngine(), RewardFunctionOfTwo(), reward_weights=weights)
        source = source_of(worker, *DYNAMIC, f"grpo.adv_estimator.name={name}", *NAMED)
        groups = source.next(0, PhaseClock())
        found[name] = (trained(groups), groups.num_filled)
        assert {trajectory.reward for trajectory in groups.generated} == {0.0}
    assert found == {"gdpo": ([0, 2], 0), "grpo": ([0, 1], 2)}

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses that the environment failed to score: never better than an answer, by any estimator."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch

from nemo_rl_moe.algorithms.evaluation import passes, summarise_evaluation
from nemo_rl_moe.algorithms.grpo_batch import (
    advantages_of_groups,
    failure_rule,
    make_batch,
    shaped_rewards,
    with_last_advantages,
)
from nemo_rl_moe.algorithms.grpo_metrics import advantage_metrics, group_metrics
from nemo_rl_moe.algorithms.logged_samples import logged_samples
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_environment import OnFailure
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.distributed.batch import count_trained_sequences, per_token
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory, rollout_metrics
from tests.support.grpo_fakes import (
    PAD_TOKEN,
    FakeEngine,
    FakeRewardFunction,
    groups_of_step,
    make_runner,
    make_source,
    prompts,
    small_config,
    trajectory,
)
from tests.support.quick_list import some_of

Rewards = Sequence[Sequence[float | None]]
"""Of each group's responses; None where the environment failed."""
NAMED = (
    *("env.reward.kind=callable", "env.reward.function=package.module:function"),
    "env.reward_weights={good: 1.0, cost: -0.5}",
)
ESTIMATORS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "grpo, divided": ("grpo.adv_estimator.normalize_rewards=true",),
    "grpo, leave one out": ("grpo.adv_estimator.use_leave_one_out_baseline=true",),
    "grpo, over the step": ("grpo.adv_estimator.normalize_rewards=true", "grpo.adv_estimator.normalize_over=batch"),
    "gdpo": ("grpo.adv_estimator.name=gdpo", *NAMED),
    "reinforce": ("grpo.adv_estimator.name=reinforce", "grpo.adv_estimator.normalize_rewards=false"),
    "reinforce_plus_plus": ("grpo.adv_estimator.name=reinforce_plus_plus",),
    "reinforce_plus_plus_baseline": ("grpo.adv_estimator.name=reinforce_plus_plus_baseline",),
    "own": (f"grpo.adv_estimator.name={__name__}:from_mean",),
}
MIXED: Rewards = [[-1.0, None, -0.5, -0.25], [1.0, 1.0, None, 1.0], [None, None, None, 0.5], [None] * 4]


def from_mean(step: EstimatorInputs) -> torch.Tensor:
    """An estimator of a user's own, which knows nothing of failures."""
    return step.rewards - step.rewards.mean(dim=1, keepdim=True)


def config_of(on_failure: OnFailure, *overrides: str, size: int = 4) -> GRPOMasterConfig:
    return small_config(
        f"env.on_failure={on_failure}",
        f"grpo.num_generations_per_prompt={size}",
        "grpo.num_prompts_per_step=2",
        f"policy.train_global_batch_size={2 * size}",
        "policy.train_micro_batch_size=1",
        *overrides,
    )


def response(reward: float | None) -> Trajectory:
    if reward is None:
        return trajectory(fault=Fault.ERROR)
    return trajectory(reward=reward, is_correct=reward >= 1, rewards={"good": reward, "cost": 0.0})


def groups_of(rewards: Rewards) -> RolloutGroups:
    responses = [response(reward) for group in rewards for reward in group]
    return RolloutGroups(responses, responses, len(rewards[0]), num_filled=0)


def failed(rewards: Rewards) -> torch.Tensor:
    return torch.tensor([[reward is None for reward in group] for group in rewards])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("on_failure", ["leave_out", "lowest"])
def test_to_fail_is_never_an_advantage(estimator: str, on_failure: OnFailure) -> None:
    """Among negative rewards 0 would be the best, and a policy would learn to break its reward function."""
    config = config_of(on_failure, *ESTIMATORS[estimator])
    advantages = advantages_of_groups(config, groups_of(MIXED))
    assert (advantages[failed(MIXED)] <= 0).all()
    assert (advantages != 0).any(), "the others are trained on"
    batch = make_batch(config, groups_of(MIXED), PAD_TOKEN, 0)
    is_trained = batch.token_mask.any(dim=1).view(4, 4)
    if on_failure == "leave_out":
        assert not is_trained[failed(MIXED)].any()
    assert not is_trained[3].any(), "of a group without any score nothing is trained on"
    assert is_trained[:2][~failed(MIXED)[:2]].all()


@pytest.mark.parametrize("estimator", ["grpo", "grpo, divided", "grpo, leave one out", "reinforce", "gdpo"])
def test_what_is_left_has_the_advantages_of_a_step_without_the_failures(estimator: str) -> None:
    config = config_of("leave_out", *ESTIMATORS[estimator])
    with_failures = advantages_of_groups(config, groups_of([[3.0, None, 1.0, 0.5], [None, 1.0, 2.0, 5.0]]))
    without = advantages_of_groups(
        config_of("leave_out", *ESTIMATORS[estimator], size=3), groups_of([[3.0, 1.0, 0.5], [1.0, 2.0, 5.0]])
    )
    torch.testing.assert_close(with_failures[0, [0, 2, 3]], without[0])
    torch.testing.assert_close(with_failures[1, 1:], without[1])
    assert with_failures[0, 1] == with_failures[1, 0] == 0


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo, over the step"])
def test_spread_of_a_step_is_that_of_its_scored_responses(estimator: str) -> None:
    uneven = advantages_of_groups(
        config_of("leave_out", *ESTIMATORS[estimator]), groups_of([[3.0, None, 1.0, None], [0.0, None, 6.0, None]])
    )
    pairs = advantages_of_groups(
        config_of("leave_out", *ESTIMATORS[estimator], size=2), groups_of([[3.0, 1.0], [0.0, 6.0]])
    )
    torch.testing.assert_close(uneven[:, [0, 2]], pairs)


def test_groups_that_have_one_answer_left_teach_nothing_and_are_counted() -> None:
    config, groups = config_of("leave_out"), groups_of(MIXED)
    takes_part = failure_rule(config).taking_part(groups.trained, 4)
    assert takes_part.tolist() == [[True, False, True, True], [True, True, False, True], [False] * 4, [False] * 4]
    batch = make_batch(config, groups, PAD_TOKEN, 0)
    assert (len(batch), count_trained_sequences(batch)) == (16, 6), "the batch keeps its size"
    metrics = group_metrics(groups, failure_rule(config)) | advantage_metrics(batch, takes_part)
    assert metrics["env/num_groups_left_out"] == 2
    assert metrics["env/failed_share"] == 9 / 16
    assert metrics["reward"] == pytest.approx((-1.75 + 3 + 0.5) / 7)
    assert metrics["accuracy"] == 3 / 16, "what nobody could score is not right"
    assert metrics["frac_zero_std_groups"] == 0.5
    assert metrics["advantages/mean"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus"])
def test_estimators_without_groups_need_one_answer_of_a_group(name: str) -> None:
    config = config_of("leave_out", *ESTIMATORS[name])
    is_trained = make_batch(config, groups_of(MIXED), PAD_TOKEN, 0).token_mask.any(dim=1).view(4, 4)
    assert torch.equal(is_trained, ~failed(MIXED))
    alone = make_batch(config, groups_of([[None, None, None, 1.0], [None] * 4]), PAD_TOKEN, 0)
    assert count_trained_sequences(alone) == (1 if name == "reinforce" else 0), "a step of one answer compares nothing"


def test_lowest_is_that_of_the_group_after_all_shaping() -> None:
    config = config_of("lowest", "grpo.adv_estimator.normalize_rewards=false")
    advantages = advantages_of_groups(config, groups_of([[-1.0, None, -0.5, -0.25], [1.0, None, 0.0, None]]))
    assert advantages[0].tolist() == pytest.approx([-0.3125, -0.3125, 0.1875, 0.4375])
    assert advantages[1].tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_of_a_reward_that_costs_the_highest_is_the_worst() -> None:
    config = config_of("lowest", *ESTIMATORS["gdpo"])
    costs = [trajectory(rewards={"good": 1.0, "cost": cost}) for cost in (0.0, 1.0, 4.0)]
    responses = [*costs, trajectory(fault=Fault.TIMEOUT)]
    advantages = advantages_of_groups(config, RolloutGroups(responses, responses, 4, 1, 0))
    assert advantages[0, 3] == advantages[0, 2] == advantages.min()


def test_zero_is_a_reward_as_any() -> None:
    groups = groups_of([[-1.0, None, -0.5, -0.25]])
    config = config_of("zero", "grpo.adv_estimator.normalize_rewards=false")
    assert advantages_of_groups(config, groups)[0].tolist() == pytest.approx([-0.5625, 0.4375, -0.0625, 0.1875])
    assert make_batch(config, groups, PAD_TOKEN, 0).token_mask.any(dim=1).all()
    assert group_metrics(groups, failure_rule(config))["reward"] == pytest.approx(-1.75 / 4)


OWN: dict[str, OnFailure] = {"a": "leave_out", "b": "lowest", "c": "zero", "d": "retry"}


def config_of_a_mixture() -> GRPOMasterConfig:
    mixture = [f"+env.mixture.{name}={{weight: 1.0, on_failure: {each}}}" for name, each in OWN.items()]
    return config_of("zero", *mixture, "grpo.adv_estimator.normalize_rewards=false")


def test_each_environment_of_a_mixture_treats_its_own_failures() -> None:
    rewards: Rewards = [[-1.0, None, -0.5, -0.25]]
    names = list(OWN)
    responses = [replace(response(reward), environment=name) for name in names for reward in rewards[0]]
    groups = RolloutGroups(responses, responses, 4, num_filled=0)
    config = config_of_a_mixture()
    advantages = advantages_of_groups(config, groups)
    for name, own in zip(names, advantages, strict=True):
        alone = config_of(OWN[name], "grpo.adv_estimator.normalize_rewards=false")
        torch.testing.assert_close(own, advantages_of_groups(alone, groups_of(rewards))[0])
    trained = make_batch(config, groups, PAD_TOKEN, 0).token_mask.any(dim=1).view(4, 4)
    assert trained[:, 1].tolist() == [False, True, True, False]
    assert trained[:, [0, 2, 3]].all()
    metrics = group_metrics(groups, failure_rule(config))
    assert [metrics[f"env/{name}/reward"] for name in names] == pytest.approx([-1.75 / 3] * 2 + [-1.75 / 4, -1.75 / 3])
    assert metrics["reward"] == pytest.approx(-1.75 * 4 / 13)
    causes = [found.left_out for found in logged_samples(config, groups)]
    assert [bool(cause) for cause in causes] == (~trained).flatten().tolist()
    assert [cause.rpartition("(")[2] for cause in causes if cause] == [
        "env.on_failure: leave_out)",
        "env.on_failure: retry)",
    ]


def test_too_few_responses_of_a_step_are_those_of_all_environments() -> None:
    """Two of `lowest` beside one that is left out where it is alone."""
    rule = replace(failure_rule(config_of_a_mixture()), fewest_of_group=1, fewest_of_step=2)
    groups = {name: [replace(response(each), environment=name) for each in (1.0, None)] for name in ("a", "b", "c")}
    assert rule.taking_part(groups["a"], 2).tolist() == [[False, False]]
    assert rule.taking_part([*groups["a"], *groups["b"]], 2).tolist() == [[True, False], [True, True]]
    failed_ones = [replace(response(None), environment="b") for _ in range(2)]
    assert rule.taking_part([*groups["a"], *failed_ones], 2).tolist() == [[False, False], [False, False]]
    assert rule.taking_part(groups["c"], 2).tolist() == [[True, True]]
    one_of_each = [groups["a"][1], *groups["c"][:1]]
    assert rule.taking_part(one_of_each, 1).tolist() == [[False], [True]], "zero needs no others"
    assert rule.taking_part([], 2).shape == (0, 2)


@pytest.mark.parametrize("estimator", some_of(ESTIMATORS, 2))
@pytest.mark.parametrize("on_failure", get_args(OnFailure))
def test_without_failures_all_are_the_same_to_the_bit(estimator: str, on_failure: OnFailure) -> None:
    rewards = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).tolist()
    found, plain = (
        advantages_of_groups(config_of(name, *ESTIMATORS[estimator]), groups_of(rewards))
        for name in (on_failure, "zero")
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize("estimator", some_of(ESTIMATORS, 2))
@pytest.mark.parametrize("on_failure", ["leave_out", "lowest"])
def test_a_step_without_any_score_has_nothing_to_train_on(estimator: str, on_failure: OnFailure) -> None:
    config, groups = config_of(on_failure, *ESTIMATORS[estimator]), groups_of([[None] * 4] * 3)
    batch = make_batch(config, groups, PAD_TOKEN, 0)
    assert batch.num_valid_tokens() == 0
    assert batch.columns["advantages"].values.tolist() == [0.0] * 12
    metrics = group_metrics(groups, failure_rule(config))
    metrics |= advantage_metrics(batch, failure_rule(config).taking_part(groups.trained, 4))
    assert metrics["env/num_groups_left_out"] == 3
    assert not metrics.keys() & {"reward", "reward_std", "frac_zero_std_groups", "advantages/mean"}


@pytest.mark.parametrize("on_failure", ["leave_out", "lowest"])
def test_divergence_and_length_do_not_lift_a_failure_above_an_answer(on_failure: OnFailure) -> None:
    """The other responses lose reward by their length and their divergence; the failed one must not gain by it."""
    kl = (
        "loss_fn.reference_policy_kl_penalty=1.0",
        "loss_fn.use_kl_in_reward=true",
        "loss_fn.reference_policy_kl_type=k1",
    )
    shaping = ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=3")
    config = config_of(on_failure, *kl, *shaping)
    answers = [trajectory(reward=reward, response_ids=[5, 6, 7, 8, 9, 1]) for reward in (-2.0, -1.0, -3.0)]
    responses = [*answers, trajectory(fault=Fault.ERROR)]
    groups = RolloutGroups(responses, responses, 4, 1, 0)
    batch = make_batch(config, groups, PAD_TOKEN, 0)
    assert batch.columns["advantages"].values[3] <= 0
    logprobs = torch.full(batch.input_ids.shape, -1.0)
    batch = batch.with_columns(prev_logprobs=per_token(logprobs), reference_logprobs=per_token(logprobs - 1))
    batch, _ = with_last_advantages(config, groups, batch)
    advantages = batch.columns["advantages"].values
    assert advantages[3] <= 0
    assert (shaped_rewards(config, groups)[0, :3] < torch.tensor([-2.0, -1.0, -3.0])).all()
    assert advantages[1] > 0


class FailsForSome(FakeRewardFunction):
    """Scores no response to some prompts; of the other prompts the first response is right."""

    def __init__(self, failing: set[int], informative: set[int]):
        super().__init__()
        self._failing, self._informative = failing, informative

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        seen: dict[str, int] = {}
        return [self._score(item, seen) for item in items]

    def _score(self, item: ScoringItem, seen: dict[str, int]) -> Score:
        number, first = int(item.record["answer"]), item.sample_id not in seen
        seen[item.sample_id] = 1
        if number in self._failing and (first or number % 2):
            return Score(0.0, is_correct=False, fault=Fault.ERROR, message="no")
        return Score(float(first and number in self._informative) - 1, is_correct=False)


def test_dynamic_sampling_takes_no_failure_for_a_spread() -> None:
    """One response to prompt 0 fails and the others get equal rewards; prompt 1 has no score at all."""
    config = small_config(
        "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_groups=8", "grpo.max_num_epochs=1"
    )
    taken = {}
    for informative in ({2, 5}, {2}):
        runner = make_runner(FakeEngine(), FailsForSome({0, 1}, informative))
        loader = PromptLoader(prompts(6), 2, seed=0, shuffle=False)
        groups = groups_of_step(make_source(config, runner, loader), 0)
        taken[len(informative)] = [found.sample_id for found in groups.trained[::3]], groups.num_filled
    assert taken == {2: (["train:2", "train:5"], 0), 1: (["train:2", "train:5"], 1)}


def test_validation_counts_a_failure_as_not_right_and_its_reward_not_at_all() -> None:
    responses = groups_of([[1.0, None], [-1.0, -3.0], [None, None]]).trained
    rule, as_zero = (failure_rule(config_of(name)) for name in ("leave_out", "zero"))
    metrics = rollout_metrics(responses, rule.counted(responses))
    assert (metrics["accuracy"], metrics["reward"]) == (1 / 6, -1.0)
    assert rollout_metrics(responses, as_zero.counted(responses))["reward"] == -0.5
    summary = summarise_evaluation(responses, 2, None, rule)
    assert summary.accuracy.mean == pytest.approx(0.5 / 3)
    assert summary.reward is not None
    assert summary.reward.mean == pytest.approx((1.0 - 2.0) / 2)
    assert summarise_evaluation(responses[4:], 2, None, rule).reward is None, "no number, which would be NaN"
    # With a threshold below 0, reward 0 in place of a score would pass.
    assert passes(responses, 2, -1.0).tolist() == [[True, False], [True, False], [False, False]]

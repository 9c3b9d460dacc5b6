# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward model over a fake: where its score is taken, what becomes of it, and its place among other rewards."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.grpo_batch import estimator_inputs, shaped_rewards
from nemo_rl_moe.algorithms.reward_model import RewardModel
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import (
    PAD_TOKEN,
    SAMPLING,
    FakeEngine,
    FakeRewardFunction,
    make_runner,
    prompts,
    small_config,
    trajectory,
)
from tests.support.grpo_inputs import tokens_of, with_tokens

SECTION = (
    "reward_model={model_name: a, adapter: null, logprob_batch_size: 2, weight: 0.5,"
    " megatron_cfg: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, expert_model_parallel_size: 1,"
    " expert_tensor_parallel_size: 1,"
    " sequence_parallel: false}}"
)
PLACED = (SECTION, "+cluster.roles.reward_model={cpu_workers_per_node: 1}")


@dataclass
class FakeScores:
    """A model whose score is the last token of a sequence, or one that is given; notes its batches."""

    always: float | None = None
    batches: list[TokenBatch] = field(default_factory=list)

    def scores(self, batch: TokenBatch) -> Tensor:
        self.batches.append(batch)
        last = batch.input_ids.gather(1, batch.lengths[:, None] - 1)[:, 0].float()
        return last if self.always is None else torch.full_like(last, self.always)


def scored(*found: Trajectory, always: float | None = None, pad: int | None = PAD_TOKEN) -> list[Trajectory]:
    return RewardModel(FakeScores(always), 0.5, pad).add_rewards(found)


def test_the_weighted_score_is_added_to_the_reward_and_logged_under_its_name() -> None:
    one, other = (
        trajectory(response_ids=(5, 6)),
        trajectory(response_ids=(5, 6, 7, 8), rewards={"short": 3.0}, reward=3.0),
    )
    first, second = scored(one, replace(other, turn_rewards=(2.0,)))
    assert (first.reward, dict(first.rewards)) == (3.0, {"reward_model": 6.0})
    assert (second.reward, dict(second.rewards)) == (7.0, {"short": 3.0, "reward_model": 8.0})
    assert replace(first, reward=0.0, rewards={}) == one, "nothing else changes"
    assert second.turn_rewards == (2.0,)


@pytest.mark.parametrize(
    ("token_ids", "pad", "score"),
    [
        ([9, 5, 6], 0, 6),
        ([9, 5, 0], 0, 5),  # as transformers does where the end token is the padding token
        ([9, 0, 6, 0, 0], 0, 6),
        ([0, 0, 0], 0, 0),
        ([9, 5, 0], None, 0),
        ([9, 5, 7], 7, 5),
    ],
)
def test_the_score_is_taken_at_the_last_token_that_is_no_padding(
    token_ids: list[int], pad: int | None, score: float
) -> None:
    (found,) = scored(with_tokens(trajectory(), tokens_of(token_ids[:1], token_ids[1:])), pad=pad)
    assert found.rewards["reward_model"] == score


def test_of_several_sequences_the_last_one_is_scored() -> None:
    several = with_tokens(trajectory(), tokens_of([9], [5]), tokens_of([9, 5, 4], [6, 7]))
    model = FakeScores()
    found, single = RewardModel(model, 1.0, PAD_TOKEN).add_rewards([several, trajectory(response_ids=(8,))])
    assert (found.reward, single.reward) == (7.0, 8.0)
    (batch,) = model.batches
    assert batch.lengths.tolist() == [5, 2]
    assert batch.input_ids[0].tolist() == [9, 5, 4, 6, 7]


def test_failed_trajectories_are_not_scored() -> None:
    failed = trajectory(fault=Fault.TIMEOUT)
    model = FakeScores()
    assert RewardModel(model, 1.0, PAD_TOKEN).add_rewards([failed]) == [failed]
    assert not model.batches
    assert [found.fault for found in scored(failed, trajectory())] == [Fault.TIMEOUT, None]


@pytest.mark.parametrize("score", [math.nan, math.inf, 1e9])
def test_a_score_that_is_no_reward_is_a_fault(score: float) -> None:
    (found,) = scored(trajectory(reward=1.0, is_correct=True, rewards={"short": 1.0}), always=score)
    assert (found.reward, found.is_correct, found.fault, found.rewards) == (0.0, False, Fault.ERROR, {})
    assert found.fault_message.startswith("reward_model: ValueError: the reward is ")


def test_the_runner_adds_it_to_every_trajectory_of_a_round() -> None:
    seen: list[Trajectory] = []
    runner = make_runner(
        FakeEngine(),
        FakeRewardFunction(reward=lambda item: 1.0),
        add_rewards=RewardModel(FakeScores(), 0.5, None).add_rewards,
        watch=SimpleNamespace(observe=seen.extend),
    )
    runner.clock = clock = PhaseClock()
    found = runner.evaluate(prompts(2), 3, SAMPLING, (0,))
    assert [each.reward for each in found] == [1 + 0.5 * float(each.sequences[0].token_ids[-1]) for each in found]
    assert seen == found, "the watch sees the faults of the reward model too"
    assert "timing/reward_model/seconds" in clock.metrics()


def test_estimators_that_compare_each_reward_get_the_score_with_its_weight() -> None:
    named = ("env.reward.kind=callable", "env.reward.function=a:b", "env.reward_weights={short: 2.0}")
    config = small_config(*PLACED, *named, "grpo.adv_estimator.name=gdpo")
    assert config.named_reward_weights == {"short": 2.0, "reward_model": 0.5}
    found = scored(*(trajectory(response_ids=(5, last), rewards={"short": 1.0}) for last in (6, 7, 8)))
    groups = RolloutGroups(found, found, 3, num_filled=0)
    inputs = estimator_inputs(config, found, shaped_rewards(config, groups))
    assert inputs.named_rewards["reward_model"].tolist() == [[6.0, 7.0, 8.0]]
    assert small_config(*named, "grpo.adv_estimator.name=gdpo").named_reward_weights == {"short": 2.0}
    assert small_config(*PLACED).named_reward_weights == {}, "one number has no name"

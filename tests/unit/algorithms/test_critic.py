# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The critic of PPO: columns worked by hand from known values, and its place in the loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.critic import Critic
from nemo_rl_moe.algorithms.grpo_batch import make_batch
from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.config.loading import load_config_as
from nemo_rl_moe.config.schema_ppo import PPOMasterConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_token
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction
from nemo_rl_moe.models.interfaces import LossFunction, TrainResult
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import PAD_TOKEN, SMALL_RUN, trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens
from tests.unit.algorithms.test_grpo_loop import Loop
from tests.unit.algorithms.test_turn_credit import response

PLAIN = ("grpo.adv_estimator.normalize_rewards=false", "ppo.gae_lambda=0.5")
"""Advantages in units of the reward, with a decay that is easy to work with."""


def ppo_config(*overrides: str) -> PPOMasterConfig:
    return load_config_as(
        PPOMasterConfig, "ppo_tiny_moe.yaml", [*SMALL_RUN, "value.logprob_batch_size=3", *overrides], check_paths=False
    )


@dataclass
class FakeValues:
    """A value model that gives the column c of each row the value c / 10, and notes what it is trained with."""

    diary: list[str] = field(default_factory=list)
    batches: list[TokenBatch] = field(default_factory=list)
    losses: list[LossFunction] = field(default_factory=list)

    def values(self, batch: TokenBatch) -> Tensor:
        self.diary.append("values")
        return torch.arange(batch.input_ids.shape[1]).expand(batch.input_ids.shape) / 10

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        self.diary.append("train critic")
        self.batches.append(batch)
        self.losses.append(loss_function)
        clipped = MetricSeries((0.25, 0.25), Reduction.SHARE)
        return TrainResult(0.5, 3.0, 2e-3, 1, 1, {"clipped_fraction": clipped}, {})


def columns_of(
    config: PPOMasterConfig, found: Sequence[Trajectory], **columns: Tensor
) -> tuple[TokenBatch, dict[str, float]]:
    """Return the batch of a group with what a critic adds to it, and the critic's metrics."""
    loop = config.grpo.model_copy(update={"num_generations_per_prompt": len(found)})
    config = config.model_copy(update={"grpo": loop})
    groups = RolloutGroups(list(found), list(found), len(found), num_filled=0)
    batch = make_batch(config, groups, PAD_TOKEN, weight_version=0)
    batch = batch.with_columns(**{name: per_token(values) for name, values in columns.items()})
    return Critic(config, FakeValues()).with_advantages(groups, batch, PhaseClock())


def values_of(batch: TokenBatch, name: str, row: int = 0) -> list[float]:
    numbers: list[float] = batch.columns[name].values[row].tolist()
    return numbers


def test_columns_of_a_response_worked_by_hand() -> None:
    # Tokens at 1, 2 and 3 with values 0.1, 0.2 and 0.3; differences 0.1, 0.1 and 1 - 0.3.
    found = with_tokens(trajectory(reward=1.0), tokens_of([9], [5, 6, 7]))
    batch, metrics = columns_of(ppo_config(*PLAIN), [found])
    assert values_of(batch, "advantages") == pytest.approx([0, 0.1 + 0.5 * 0.45, 0.1 + 0.5 * 0.7, 0.7])
    assert values_of(batch, "previous_values") == pytest.approx([0, 0.1, 0.2, 0.3])
    assert values_of(batch, "returns") == pytest.approx([0, 0.425, 0.65, 1.0])
    assert metrics["critic/values/mean"] == pytest.approx(0.2)
    assert metrics["critic/returns/max"] == pytest.approx(1.0)
    returns = torch.tensor([0.425, 0.65, 1.0], dtype=torch.float64)
    errors = returns - torch.tensor([0.1, 0.2, 0.3])
    expected = 1 - float(errors.var(correction=0) / returns.var(correction=0))
    assert metrics["critic/explained_variance"] == pytest.approx(expected)


def test_the_critic_may_learn_returns_of_another_decay() -> None:
    found = with_tokens(trajectory(reward=1.0), tokens_of([9], [5, 6, 7]))
    batch, _ = columns_of(ppo_config(*PLAIN, "ppo.gae_lambda_value=1.0"), [found])
    assert values_of(batch, "advantages")[1] == pytest.approx(0.325)
    assert values_of(batch, "returns") == pytest.approx([0, 1, 1, 1])


def test_turns_are_joined_over_what_the_environment_wrote() -> None:
    # Two given tokens before each of two turns of two tokens: 2, 3 and 6, 7. Rewards 1 at 3, and 2 + 4 at 7.
    batch, _ = columns_of(ppo_config(*PLAIN), [response([1.0, 2.0], 4.0)])
    last, before = 6 - 0.7, 0.1 + 0.5 * (6 - 0.7)
    first_turn = 1 + 0.6 - 0.3 + 0.5 * before
    expected = [0, 0, 0.1 + 0.5 * first_turn, first_turn, 0, 0, before, last]
    assert values_of(batch, "advantages") == pytest.approx(expected)


def test_sequences_of_a_trajectory_are_one_row_of_decisions() -> None:
    # Values are those of each sequence's own columns: 0.1; then 0.2 and 0.3.
    found = with_tokens(trajectory(reward=1.0), tokens_of([9], [5]), tokens_of([9, 5], [6, 7]))
    batch, _ = columns_of(ppo_config(*PLAIN), [found])
    assert values_of(batch, "advantages", 1) == pytest.approx([0, 0, 0.1 + 0.5 * 0.7, 0.7])
    assert values_of(batch, "advantages", 0) == pytest.approx([0, 0.1 + 0.5 * 0.45, 0, 0])
    assert values_of(batch, "previous_values", 0) == pytest.approx([0, 0.1, 0, 0])


def test_the_divergence_is_taken_from_the_reward_of_each_token() -> None:
    kl = ("loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.use_kl_in_reward=true")
    config = ppo_config(*PLAIN, *kl, "loss_fn.reference_policy_kl_type=k1", "ppo.gae_lambda=0.0")
    found = with_tokens(trajectory(reward=1.0), tokens_of([9], [5, 6]))
    logprobs, reference = torch.tensor([[0.0, -1.0, -1.0]]), torch.tensor([[-7.0, -3.0, 0.0]])
    batch, _ = columns_of(config, [found], prev_logprobs=logprobs, reference_logprobs=reference)
    assert values_of(batch, "advantages") == pytest.approx([0, 0.2 - 0.1 - 0.1 * 2, 1 - 0.2 + 0.1 * 1])


def test_what_is_not_trained_on_has_no_part_in_the_spread() -> None:
    failed = replace(trajectory(), fault=Fault.ERROR)
    truncated = trajectory(reward=9.0, is_truncated=True)
    config = ppo_config("grpo.overlong_filtering=true")
    batch, metrics = columns_of(config, [trajectory(reward=1.0), trajectory(), failed, truncated])
    alone, metrics_alone = columns_of(config, [trajectory(reward=1.0), trajectory()])
    for row in range(2):
        assert values_of(batch, "advantages", row) == values_of(alone, "advantages", row)
        assert not any(values_of(batch, "advantages", 2 + row))
        assert not any(values_of(batch, "returns", 2 + row))
    assert metrics == metrics_alone
    trained = alone.columns["advantages"].values[alone.token_mask].double()
    assert (float(trained.mean()), float(trained.std())) == pytest.approx((0, 1), abs=1e-6)


def test_advantages_are_bounded_after_they_are_normalised() -> None:
    batch, _ = columns_of(ppo_config("grpo.advantage_clip_high=0.25"), [trajectory(reward=1.0), trajectory()])
    assert batch.columns["advantages"].values.max() == 0.25


def test_the_critic_trains_before_the_policy_and_alone_at_first() -> None:
    config, model = ppo_config("grpo.max_num_steps=2", "ppo.policy_training_start_step=1"), FakeValues()
    loop = Loop(config, has_validation=False, diary=model.diary, stop_after=-1, critic=Critic(config, model))
    assert loop.diary == [
        *("generate", "score", "values", "train critic", "log 1"),
        *("generate", "score", "values", "train critic", "train", "save 2", "log 2", "finish"),
    ]
    assert model.losses == [ValueLoss(None), ValueLoss(None)]
    assert {"returns", "previous_values"} <= model.batches[0].columns.keys()
    (batch,) = loop.policy.batches
    assert torch.equal(batch.columns["advantages"].values, model.batches[1].columns["advantages"].values)
    (_, alone), (_, both) = loop.logger.records
    assert "train/loss" not in alone
    assert "train/reward" in alone
    for metrics in (alone, both):
        assert (metrics["train/critic/value_loss"], metrics["train/critic/lr"]) == (0.5, 2e-3)
        assert (metrics["train/critic/grad_norm"], metrics["train/critic/clipped_fraction"]) == (3.0, 0.5)
    assert both["train/loss"] == 1

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories of several sequences: what is of a trajectory, and what is of a row of its batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.grpo_batch import estimator_inputs, make_batch, with_last_advantages
from nemo_rl_moe.algorithms.grpo_metrics import advantage_metrics
from nemo_rl_moe.distributed.batch import Axis, per_token
from nemo_rl_moe.models.images import ModelImage, image_inputs
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.training_batch import advantage_column, sampled_tokens, token_lags, training_batch
from nemo_rl_moe.rollouts.trajectory import (
    Trajectory,
    group_sampled_tokens,
    rollout_metrics,
    rows_of,
    sequences_of,
    trajectory_of_each_sequence,
)
from nemo_rl_moe.token_lag import NO_LAG
from tests.support.grpo_fakes import PAD_TOKEN, small_config, trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens

KL = ("loss_fn.reference_policy_kl_penalty=0.5", "loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_type=k1")


def some() -> list[Trajectory]:
    """Two of one sequence, and between them one of two, which begin alike."""
    first, second = tokens_of([10, 11], [5, 6], [-1.0, -2.0], version=3), tokens_of([10, 11, 5, 6, 9], [7], [-3.0])
    return [
        trajectory(response_ids=[5, 1], reward=1.0, sample_id="a"),
        with_tokens(trajectory(reward=0.5, is_truncated=True, sample_id="b"), first, second),
        trajectory(response_ids=[5, 6, 1], reward=0.0, sample_id="c"),
    ]


def test_rows() -> None:
    found = some()
    assert [len(sequence) for sequence in sequences_of(found)] == [3, 4, 6, 4]
    assert rows_of(found) == [range(1), range(1, 3), range(3, 4)]
    assert trajectory_of_each_sequence(found) == [0, 1, 1, 2]
    assert [each.num_sampled_tokens for each in found] == [2, 3, 3]
    assert [each.weight_version for each in found] == [0, 3, 0]
    assert group_sampled_tokens(found, 3).tolist() == [[2, 3, 3]]
    assert sampled_tokens(found).sum(1).tolist() == [2, 2, 1, 3]


def test_a_row_is_a_sequence_with_the_advantage_of_its_trajectory() -> None:
    advantages = torch.tensor([[1.0, -2.0, 3.0]])
    batch = training_batch(some(), advantages, PAD_TOKEN, leave_out_truncated=False)
    assert batch.sample_ids == ("a", "b", "b", "c")
    assert batch.sample_sizes == (1, 2, 1)
    assert batch.first_rows_of_samples() == [0, 1, 3]
    assert batch.columns["advantages"].values.tolist() == [1.0, -2.0, -2.0, 3.0]
    assert batch.input_ids[2].tolist() == [10, 11, 5, 6, 9, 7]
    assert batch.token_mask[1:3].nonzero().tolist() == [[0, 2], [0, 3], [1, 5]], "no sampled token twice"
    assert batch.columns["generation_logprobs"].values[1:3, 2:].tolist() == [[-1, -2, 0, 0], [0, 0, 0, -3]]
    part = torch.ones(1, 3, dtype=torch.bool)
    means = advantage_metrics(batch, part)
    assert means == {"advantages/mean": pytest.approx(2 / 3), "advantages/min": -2.0, "advantages/max": 3.0}


def test_both_sequences_are_left_out() -> None:
    advantages = torch.zeros(1, 3)
    truncated = training_batch(some(), advantages, PAD_TOKEN, leave_out_truncated=True)
    assert truncated.token_mask.any(1).tolist() == [True, False, False, True]
    part = torch.tensor([[True, False, True]])
    other = training_batch(some(), advantages, PAD_TOKEN, leave_out_truncated=False, takes_part=part)
    assert torch.equal(other.token_mask, truncated.token_mask)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_advantage_for_each_token_of_the_sequences_behind_one_another(as_tensor: bool) -> None:
    found = some()
    sizes = [each.num_tokens for each in found]
    of_tokens = [torch.arange(size) + 100.0 * number for number, size in enumerate(sizes)]
    padded = torch.nn.utils.rnn.pad_sequence(of_tokens, batch_first=True)[None]
    column = advantage_column(padded if as_tensor else of_tokens, found)
    assert column.axis is Axis.TOKEN
    assert column.values[1].tolist() == [100, 101, 102, 103, 0, 0]
    assert column.values[2].tolist() == [104, 105, 106, 107, 108, 109]
    assert column.values[3].tolist() == [200, 201, 202, 203, 0, 0]
    config = small_config("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=3")
    mask = estimator_inputs(config, found, torch.zeros(1, 3)).token_mask
    assert mask.shape == padded.shape
    assert mask[0, 1].nonzero().flatten().tolist() == [2, 3, 9]


def test_lags_and_metrics() -> None:
    lags = token_lags(some(), 4)
    assert lags[1].tolist() == [NO_LAG, NO_LAG, 1, 1, NO_LAG, NO_LAG]
    assert lags[2].tolist() == [*[NO_LAG] * 5, 4]
    metrics = rollout_metrics(some())
    assert metrics["mean_sequences_per_sample"] == pytest.approx(4 / 3)
    assert metrics["mean_gen_tokens_per_sample"] == pytest.approx(8 / 3)
    assert "mean_sequences_per_sample" not in rollout_metrics(some()[:1])


def test_images_of_both_sequences_come_once() -> None:
    images = [ModelImage(np.full((2, 2, 3), value, dtype=np.uint8)) for value in range(3)]
    none = np.zeros(3, np.bool_)
    first = tokens_of([10], [5, 1], model_inputs=image_inputs([images[0], images[0]], none))
    second = tokens_of([10], [5, 1], model_inputs=image_inputs(images, none))
    shown = with_tokens(trajectory(), first, second).images
    assert [int(image.pixels[0, 0, 0]) for image in shown] == [0, 0, 1, 2]
    assert trajectory().images == []


def test_the_divergence_of_all_sequences_is_taken_from_the_reward() -> None:
    """The reference gives each sampled token 1 nat less: 2, 3 and 3 nats, by their number."""
    config = small_config("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=3", *KL)
    found = some()
    groups = RolloutGroups(found, found, 3, 1, 0)
    batch = make_batch(config, groups, PAD_TOKEN, 3)
    logprobs = torch.full(batch.input_ids.shape, -1.0)
    batch = batch.with_columns(prev_logprobs=per_token(logprobs), reference_logprobs=per_token(logprobs - 1))
    changed, metrics = with_last_advantages(config, groups, batch)
    assert metrics == {"kl_penalty": 1.0}
    rewards = [1.0 - 0.5 * 2, 0.5 - 0.5 * 3, 0.0 - 0.5 * 3]
    expected = make_batch(
        config, RolloutGroups(rewarded(found, rewards), rewarded(found, rewards), 3, 1, 0), PAD_TOKEN, 3
    )
    torch.testing.assert_close(changed.columns["advantages"].values, expected.columns["advantages"].values)
    assert changed.columns["advantages"].values[1] == changed.columns["advantages"].values[2]


def rewarded(trajectories: list[Trajectory], rewards: list[float]) -> list[Trajectory]:
    return [replace(each, reward=reward) for each, reward in zip(trajectories, rewards, strict=True)]

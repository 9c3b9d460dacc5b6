# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.algorithms.grpo_metrics import advantage_metrics, group_metrics
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import rollout_metrics
from tests.support.grpo_fakes import AS_ZERO, PAD_TOKEN, trajectory

DULL = [
    trajectory(reward=0.0, response_ids=[5, 6, 7, 8], is_truncated=True),
    trajectory(reward=0.0, fault=Fault.TIMEOUT),
]
GOOD = [trajectory(reward=1.0, is_correct=True), trajectory(reward=0.0, response_ids=[5, 6, 7, 1], fault=Fault.ERROR)]
FAULTS = {"env/num_errors": 1.0, "env/num_timeouts": 1.0, "env/num_died": 0.0, "env/failed_share": 0.5}


def test_all_generated_responses_are_reported() -> None:
    groups = RolloutGroups(trained=GOOD, generated=[*DULL, *GOOD], num_generations=2, num_filled=0)
    assert group_metrics(groups, AS_ZERO) == {
        "reward": 0.25,
        "reward_std": 0.5,
        "accuracy": 0.25,
        "mean_gen_tokens_per_sample": 3.0,
        "max_gen_tokens_per_sample": 4.0,
        "truncation_rate": 0.25,
        **FAULTS,
        "env/num_groups_left_out": 0.0,
        "frac_zero_std_groups": 0.5,
        "dynamic_sampling/num_gen_batches": 2.0,
        "dynamic_sampling/num_filled_groups": 0.0,
        "filtered_reward": 0.5,
    }


def test_truncated_responses_that_nobody_scored_are_counted() -> None:
    """Of four responses one is cut with reward 0; a cut one with a reward has been scored by its own code."""
    rollouts = [*DULL, *GOOD]
    groups = RolloutGroups(rollouts, rollouts, num_generations=2, num_filled=0)
    rule = replace(AS_ZERO, leave_truncated=frozenset({""}))
    assert group_metrics(groups, rule)["truncation_rate_unscored"] == 0.25
    assert "truncation_rate_unscored" not in group_metrics(groups, AS_ZERO)
    scored = [replace(DULL[0], reward=0.5), *rollouts[1:]]
    groups = RolloutGroups(scored, scored, num_generations=2, num_filled=0)
    assert group_metrics(groups, rule)["truncation_rate_unscored"] == 0.0


def test_the_rule_knows_who_leaves_truncated_responses() -> None:
    config = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    assert failure_rule(config).leave_truncated == {""}
    config = load_grpo_config("grpo_tiny_moe.yaml", ["env.score_truncated=true"], check_paths=False)
    assert failure_rule(config).leave_truncated == frozenset()


def test_of_a_plain_step_nothing_is_said_of_dynamic_sampling() -> None:
    rollouts = [*DULL, *GOOD]
    groups = RolloutGroups(trained=rollouts, generated=rollouts, num_generations=2, num_filled=0)
    metrics = group_metrics(groups, AS_ZERO)
    assert not [name for name in metrics if "dynamic" in name or "filtered" in name]
    assert metrics["frac_zero_std_groups"] == 0.5
    filled = group_metrics(replace(groups, num_filled=1), AS_ZERO)
    assert filled["dynamic_sampling/num_filled_groups"] == 1.0


def test_a_group_of_one_has_no_spread_to_lack() -> None:
    rollouts = [*DULL, *GOOD]
    metrics = group_metrics(RolloutGroups(rollouts, rollouts, num_generations=1, num_filled=0), AS_ZERO)
    assert "frac_zero_std_groups" not in metrics
    assert metrics["reward_std"] == 0.5


def test_advantages_count_each_response_once_however_long_it_is() -> None:
    advantages = torch.tensor([[0.75, -0.25], [2.0, -1.5]], dtype=torch.float64)
    batch = training_batch([*DULL, *GOOD], advantages, PAD_TOKEN, leave_out_truncated=True)
    assert advantage_metrics(batch, torch.ones(2, 2, dtype=torch.bool)) == {
        "advantages/mean": pytest.approx(0.25),
        "advantages/min": -1.5,
        "advantages/max": 2.0,
    }


def test_named_rewards_are_distinguished_and_add_up_to_the_reward() -> None:
    weights = {"accuracy": 1.0, "format": -0.5}
    named = [{"accuracy": 1.0, "format": 0.5}, {"accuracy": 0.0, "format": 2.0}, {}, {"accuracy": 2.0, "format": 0.5}]
    # The third was not scored: 0 of each, as its reward is.
    worth = [sum(weights[name] * rewards.get(name, 0.0) for name in weights) for rewards in named]
    found = rollout_metrics([trajectory(reward=r, rewards=n) for r, n in zip(worth, named, strict=True)])
    assert found["rewards/accuracy/mean"] == 0.75
    assert found["rewards/accuracy/std"] == pytest.approx((11 / 12) ** 0.5)
    assert found["rewards/format/mean"] == 0.75
    assert found["reward"] == pytest.approx(0.75 - 0.5 * 0.75)
    assert not [name for name in rollout_metrics(GOOD) if name.startswith("rewards/")]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults: rewards that are none, and numbers of faults as metrics."""

import math

import pytest

from nemo_rl_moe.rewards.interface import Fault, Score, checked_score, fault_metrics


@pytest.mark.parametrize("reward", [0.0, -1e6, 1e6, 0.25])
def test_a_reward_is_left_as_it_is(reward):
    assert checked_score(score := Score(reward, is_correct=True)) is score


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1000000.5])
def test_what_is_no_reward_is_reported(reward):
    found = checked_score(Score(reward, is_correct=True))
    assert (found.reward, found.is_correct, found.fault) == (0.0, False, Fault.ERROR)
    assert found.message == f"ValueError: the reward is {reward}, expected a number from -1,000,000 to 1,000,000"


def test_counts_by_hand():
    faults = [None, Fault.ERROR, Fault.TIMEOUT, Fault.ERROR, None, Fault.DIED, Fault.ERROR]
    metrics = fault_metrics(faults)
    assert metrics == {"env/num_errors": 3.0, "env/num_timeouts": 1.0, "env/num_died": 1.0, "env/failed_share": 5 / 7}
    assert all(isinstance(value, float) for value in metrics.values())


def test_no_fault_is_zero_and_not_missing():
    names = ("env/num_errors", "env/num_timeouts", "env/num_died", "env/failed_share")
    assert fault_metrics([]) == fault_metrics([None]) == dict.fromkeys(names, 0.0)


def named(**rewards: float) -> Score:
    return Score.named(rewards, is_correct=True)


WEIGHTS = {"accuracy": 2.0, "format": -0.5, "length": 0.0}
NAMED = named(length=7.0, format=0.5, accuracy=1.0)


def test_named_rewards_are_added_up_by_their_weights():
    found = checked_score(NAMED, WEIGHTS)
    assert (found.reward, found.is_correct, found.fault) == (1.75, True, None)
    assert found.rewards == {"accuracy": 1.0, "format": 0.5, "length": 7.0}
    assert checked_score(found, WEIGHTS) == found, "a trajectory of several turns checks once more"


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (Score(1.0, True), "one number as reward, expected one for each name of env.reward_weights: accuracy,"),
        (named(formt=1.0), "the reward 'formt' is not in env.reward_weights, which"),
        (named(accuracy=1.0, length=1.0), "no reward 'format', which"),
        (named(accuracy=1.0, format=math.nan, length=7.0), "the reward 'format' is nan, exp"),
        # One of weight 0 too: it is logged.
        (named(accuracy=1.0, format=0.5, length=1e7), "the reward 'length' is 10000000.0,"),
        (named(accuracy=9e5, format=0.5, length=7.0), "the reward is 1799999.75, expected"),
    ],
)
def test_what_is_no_named_reward_is_reported(score, problem):
    found = checked_score(score, WEIGHTS)
    assert (found.reward, found.is_correct, found.fault, found.rewards) == (0.0, False, Fault.ERROR, {})
    assert found.message.startswith(f"ValueError: {problem}")
    assert ("formt" in problem) == found.message.endswith("did you mean format?")


def test_named_rewards_without_weights_are_reported():
    found = checked_score(NAMED)
    assert (found.reward, found.fault, found.rewards) == (0.0, Fault.ERROR, {})
    assert "rewards by name (length, format, accuracy) need env.reward_weights, which is null" in found.message


def test_a_fault_needs_no_names_but_a_number():
    fault = Score(0.0, is_correct=False, fault=Fault.TIMEOUT, message="took longer than 5 s")
    assert checked_score(fault, WEIGHTS) is fault
    found = checked_score(Score(math.nan, is_correct=False, fault=Fault.TIMEOUT), WEIGHTS)
    assert (found.reward, found.fault) == (0.0, Fault.ERROR)

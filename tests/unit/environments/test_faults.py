# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults: rewards that are none, and numbers of faults as metrics."""

import math

import pytest

from nemo_rl_moe.environments.interface import Fault, Score, checked_score, fault_metrics


@pytest.mark.parametrize("reward", [0.0, -1e6, 1e6, 0.25])
def test_a_reward_is_left_as_it_is(reward):
    assert checked_score(score := Score(reward, is_correct=True)) is score


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1000000.5])
def test_what_is_no_reward_is_told(reward):
    found = checked_score(Score(reward, is_correct=True))
    assert (found.reward, found.is_correct, found.fault) == (0.0, False, Fault.ERROR)
    assert found.message == f"ValueError: the reward is {reward}, expected a number from -1,000,000 to 1,000,000"


def test_counts_by_hand():
    faults = [None, Fault.ERROR, Fault.TIMEOUT, Fault.ERROR, None, Fault.DIED, Fault.ERROR]
    metrics = fault_metrics(faults)
    assert metrics == {"env/num_errors": 3.0, "env/num_timeouts": 1.0, "env/num_died": 1.0}
    assert all(isinstance(value, float) for value in metrics.values())


def test_no_fault_is_zero_and_not_missing():
    assert fault_metrics([]) == {"env/num_errors": 0.0, "env/num_timeouts": 0.0, "env/num_died": 0.0}

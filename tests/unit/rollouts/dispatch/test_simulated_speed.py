# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Speed of asynchronous rollouts in simulated time, where it is the same on every machine."""

import pytest

from benchmarks.asynchronous_rollouts import SCENARIOS, result_of

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.full
def test_overlap_reaches_its_bound_where_training_is_longer() -> None:
    result = result_of(BY_NAME["training_longer"], num_steps=8, warm_up=2)
    assert result["synchronous_step_s"] == pytest.approx(1.35)
    assert result["asynchronous_step_s"] == pytest.approx(0.81)
    assert result["share_of_bound"] == pytest.approx(1.0)


@pytest.mark.full
def test_equal_parts_are_hidden_behind_each_other() -> None:
    result = result_of(BY_NAME["equal"], num_steps=16, warm_up=3)
    assert float(result["speedup"]) > 1.6


@pytest.mark.slow
def test_nobody_waits_for_the_tools_of_others() -> None:
    result = result_of(BY_NAME["tools"])
    assert float(result["speedup"]) > 2.5
    assert float(result["share_of_bound"]) > 0.9
    assert float(result["engines_idle_asynchronous"]) < float(result["engines_idle_synchronous"]) / 2

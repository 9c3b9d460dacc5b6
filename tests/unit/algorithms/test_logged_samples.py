# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples of a step: those that are not trained on say why, and failed ones that were replaced are there."""

import pytest

from nemo_rl_moe.algorithms.logged_samples import NOT_IN_BATCH, TRUNCATED, logged_samples
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory
from tests.support.grpo_fakes import small_config, trajectory

RULE = "(env.on_failure: leave_out)"


def test_what_is_left_out_says_why() -> None:
    good, failed = trajectory(text="good"), trajectory(fault=Fault.TIMEOUT, text="failed")
    trained = [good, failed, good, good, failed, failed]
    replaced = [trajectory(text="replaced"), trajectory(fault=Fault.DIED, text="gone")]
    groups = RolloutGroups(trained, [*trained, *replaced], num_generations=3, num_filled=0)
    config = small_config("env.on_failure=leave_out")
    found = logged_samples(config, groups)
    failure, alone = f"timeout: it broke {RULE}", f"only 1 of 3 responses of its group could be scored {RULE}"
    expected = ["", failure, "", alone, failure, failure, NOT_IN_BATCH]
    assert [one.left_out for one in found] == expected
    assert found[0] is good
    assert found[-1].response_text == "gone"


@pytest.mark.parametrize(
    ("first", "setting", "expected"),
    [
        (trajectory(is_truncated=True), "grpo.overlong_filtering=true", TRUNCATED),
        (trajectory(is_truncated=True), "grpo.overlong_filtering=false", ""),
        (trajectory(fault=Fault.ERROR), "env.on_failure=lowest", ""),
    ],
    ids=["truncated and filtered", "truncated and not filtered", "failed and counted"],
)
def test_what_counts_is_not_left_out(first: Trajectory, setting: str, expected: str) -> None:
    trained = [first, trajectory(), trajectory()]
    groups = RolloutGroups(trained, trained, num_generations=3, num_filled=0)
    assert [one.left_out for one in logged_samples(small_config(setting), groups)] == [expected, "", ""]

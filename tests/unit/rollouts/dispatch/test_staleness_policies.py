# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies of staleness: what each chooses, what none may do, and custom ones."""

from collections.abc import Sequence

import pytest

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.staleness import LiveGroup, OnStale, QueueView, StalenessPolicy, make_policy

KEY = "grpo.rollouts.policy"
BOUNDS = Bounds(groups_per_step=2, max_staleness=2)


def policy(name: str, on_stale: OnStale = "drop") -> StalenessPolicy:
    return make_policy(KEY, name, BOUNDS, on_stale)


def group(position: int, version: int, finish_number: int | None = None) -> LiveGroup:
    return LiveGroup(position, version, version, finish_number)


LIVE = [group(0, 4, 3), group(1, 3), group(2, 3, 1), group(3, 4, 0), group(4, 4, 2)]


def test_each_policy_has_its_order() -> None:
    assert policy("in_order").select(LIVE, 4) == [], "group 1 runs"
    assert policy("windowed").select(LIVE, 4) == [0, 2], "the oldest version first"
    assert policy("ready_first").select(LIVE, 4) == [2, 3], "the first that finished"
    done = [group(0, 4, 3), group(1, 3, 4), *LIVE[2:]]
    assert policy("in_order").select(done, 4) == [0, 1]


def test_too_few_finished_groups_are_no_step() -> None:
    for name in ("in_order", "windowed", "ready_first"):
        assert policy(name).select([group(0, 4, 0), group(1, 4)], 4) == []


@pytest.mark.parametrize("name", ["in_order", "windowed", "ready_first"])
def test_with_wait_no_group_is_overtaken_once_too_often(name: str) -> None:
    """At version 5 group 1 may be trained on for the last time."""
    assert policy(name, "wait").select(LIVE, 5) == []
    done = [group(0, 4, 3), group(1, 3, 4), *LIVE[2:]]
    assert policy(name, "wait").select(done, 5) == [1, 2]


@pytest.mark.parametrize("name", ["windowed", "ready_first"])
def test_with_wait_later_steps_have_room_for_what_gets_too_old_together(name: str) -> None:
    """Groups 0 to 2 get too old after one further step, which trains on two: this step needs one of them."""
    young = [group(3, 4, 0), group(4, 4, 1)]
    assert policy(name, "wait").select([group(0, 3), group(1, 3), group(2, 3), *young], 4) == []
    assert policy(name, "wait").select([group(0, 3), group(1, 3), group(2, 3, 2), *young], 4) == [2, 3]
    assert policy(name, "wait").select([group(0, 3), group(1, 3), *young], 4) == [3, 4]
    assert policy(name, "drop").select([group(0, 3), group(1, 3), group(2, 3), *young], 4) == [3, 4]


def test_what_is_too_old_runs_or_waits_in_the_queue() -> None:
    assert policy("windowed").stale(LIVE, 5) == []
    assert policy("windowed").stale(LIVE, 6) == [1, 2]


def test_a_restart_makes_no_group_younger() -> None:
    restarted = LiveGroup(0, version=5, admitted_version=2, finish_number=None)
    assert policy("windowed").stale([restarted], 5) == [0]
    assert policy("ready_first", "wait").select([restarted, *LIVE[2:]], 4) == [], "it is waited for"


def last_ready(view: QueueView) -> Sequence[int]:
    return [group.position for group in view.ready[-view.num_needed :]]


def running(view: QueueView) -> Sequence[int]:
    return [group.position for group in view.groups if not group.is_ready]


def twice(view: QueueView) -> Sequence[int]:
    return [view.ready[0].position] * view.num_needed


def test_a_custom_policy_is_a_function_of_the_queue() -> None:
    assert policy(f"{__name__}:last_ready").select(LIVE, 4) == [3, 4]


@pytest.mark.parametrize("name", ["running", "twice"])
def test_a_custom_policy_cannot_break_the_rules(name: str) -> None:
    text = rf"grpo.rollouts.policy: .*:{name} chose \[.*expected at most 2 different positions of finished groups"
    with pytest.raises(ConfigurationError, match=text):
        policy(f"{__name__}:{name}").select(LIVE, 4)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got 'newest', expected in_order, windowed, ready_first or package"):
        policy("newest")
    with pytest.raises(ConfigurationError, match="has no missing"):
        policy(f"{__name__}:missing")

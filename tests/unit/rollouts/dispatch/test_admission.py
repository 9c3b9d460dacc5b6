# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of groups: their bounds, and that no group is counted twice or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.rollouts.dispatch.admission import Admission, Bounds


def admitted_at(bounds: Bounds, version: int) -> int:
    return Admission.resumed(bounds, version).capacity(version)


def test_capacity_is_a_step_and_what_may_run_ahead() -> None:
    assert admitted_at(Bounds(4, max_staleness=0), 0) == 4
    assert admitted_at(Bounds(4, max_staleness=2), 0) == 12
    assert admitted_at(Bounds(4, max_staleness=2), 50) == 12
    assert admitted_at(Bounds(4, max_staleness=2, target_lag=1), 50) == 8
    assert admitted_at(Bounds(4, max_staleness=2, concurrency=3), 0) == 3


def test_several_updates_a_step_age_a_group_faster() -> None:
    """With four updates a step, groups of the step before are four optimizer steps old."""
    assert [admitted_at(Bounds(2, lag, updates_per_step=4), 8) for lag in (0, 3, 4, 7, 8)] == [2, 2, 4, 4, 6]


def test_a_trained_step_makes_no_capacity_until_its_weights_are_there() -> None:
    counts = Admission(Bounds(2, max_staleness=0)).admit(0).admit(0).finish().finish().consume()
    assert [counts.capacity(version) for version in (0, 1)] == [0, 2]


def test_a_queue_that_is_longer_than_a_smaller_bound_leaves_no_capacity() -> None:
    assert Admission.resumed(Bounds(2, max_staleness=0), 4, finished=6).capacity(4) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"groups_per_step": 0}, {"concurrency": 0}, {"target_lag": 3}, {"target_lag": -1}, {"updates_per_step": 0}],
    ids=str,
)
def test_impossible_bounds_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Bounds(**{"groups_per_step": 1, "max_staleness": 2, **wrong})


@pytest.mark.parametrize("event", ["finish", "reject_running", "reject_finished", "consume"])
def test_a_group_that_is_not_there_cannot_be_counted(event: str) -> None:
    with pytest.raises(ValueError, match="counted once"):
        getattr(Admission(Bounds(1)), event)()


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    max_staleness = draw(st.integers(0, 6))
    return Bounds(
        draw(st.integers(1, 4)),
        max_staleness,
        draw(st.none() | st.integers(1, 6)),
        draw(st.none() | st.integers(0, max_staleness)),
        draw(st.integers(1, 3)),
    )


EVENTS = st.sampled_from(["admit", "admit", "finish", "finish", "train", "train", "running", "finished"])


@settings(deadline=None)
@given(bounds(), st.integers(0, 5), st.lists(EVENTS, min_size=20, max_size=100))
def test_any_order_of_events_keeps_the_bounds(bounds: Bounds, first_step: int, events: list[str]) -> None:
    """First come, first served, no group is older than allowed; there is capacity while a step's groups are missing."""
    version = first_step * bounds.updates_per_step
    counts, running, queue = Admission.resumed(bounds, version), list[int](), list[int]()
    for event in events:
        if event == "admit" and counts.capacity(version):
            counts, running = counts.admit(version), [*running, version]
        elif event == "finish" and running:
            counts, queue = counts.finish(), [*queue, running.pop(0)]
        elif event == "running" and running:
            counts, _ = counts.reject_running(), running.pop()
        elif event == "finished" and queue:
            counts, _ = counts.reject_finished(), queue.pop()
        elif event == "train" and len(queue) >= bounds.groups_per_step:
            taken, queue = queue[: bounds.groups_per_step], queue[bounds.groups_per_step :]
            assert not any(bounds.is_stale(since, version) for since in taken)
            counts, version = counts.consume(), version + bounds.updates_per_step
        assert (counts.running, counts.finished) == (len(running), len(queue))
        assert not any(bounds.is_stale(since, version) for since in queue[: bounds.groups_per_step])
        assert counts.consumed * bounds.updates_per_step == version * bounds.groups_per_step
        assert bounds.concurrency is None or counts.running <= bounds.concurrency
        assert counts.consumed + counts.live <= bounds.most_admitted(version)
        if counts.live < bounds.groups_per_step and not running:
            assert counts.capacity(version) > 0

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Findings of staleness: a loss that bounds nothing meets old tokens, and lag that costs more than overlap gains."""

import pytest

from nemo_rl_moe.routing.findings.staleness_signal import (
    EFFECTIVE_SAMPLES,
    ENGINES_IDLE,
    STEP_S,
    TRAINER_IDLE,
    UNBOUNDED_LAG,
    WAIT_S,
    overlap_balance,
)
from nemo_rl_moe.routing.findings.tracker import FindingTracker, Thresholds

LIMITS = Thresholds(None, None, None, sustained_steps=3, unbounded_lag=3)


def test_an_unclipped_loss_with_a_lag_of_three_is_found_at_once() -> None:
    """A20, tinker-cookbook#822: with a lag of 3 an unclipped loss diverges and a clipped one does not."""
    tracker = FindingTracker(LIMITS, None)
    assert tracker.observe(1, {UNBOUNDED_LAG: 2.0}) == []
    (found,) = tracker.observe(2, {UNBOUNDED_LAG: 3.0})
    assert (found.kind, found.first_step) == ("unbounded_staleness", 2)
    assert "3 optimizer steps old" in found.text
    assert tracker.observe(3, {UNBOUNDED_LAG: 4.0}) == [], "one alert an episode"
    tracker.observe(4, {UNBOUNDED_LAG: 1.0})
    assert tracker.findings[0].is_over


def test_a_bounded_loss_may_meet_any_lag() -> None:
    """It does not report the metric: `by_lag/max_lag` alone is no finding."""
    assert FindingTracker(LIMITS, None).observe(1, {"train/by_lag/max_lag": 9.0}) == []


def test_without_a_limit_nothing_is_found() -> None:
    limits = Thresholds(None, None, None, sustained_steps=3)
    assert FindingTracker(limits, None).observe(1, {UNBOUNDED_LAG: 9.0}) == []


def step(waiting: float, effective: float) -> dict[str, float]:
    return {STEP_S: 10.0, WAIT_S: 10.0 * waiting, EFFECTIVE_SAMPLES: effective}


@pytest.mark.parametrize(
    ("waiting", "effective", "pays"),
    [(0.0, 0.51, True), (0.0, 0.49, False), (0.5, 0.7, True), (0.5, 0.6, False), (1.0, 0.99, False), (1.0, 1.0, True)],
)
def test_overlap_gains_at_most_the_time_that_training_does_not_wait(
    waiting: float, effective: float, pays: bool
) -> None:
    balance = overlap_balance(step(waiting, effective))
    assert balance is not None
    assert balance.most_speedup == pytest.approx(2 - waiting)
    assert balance.pays == pays


def test_shares_of_one_window_are_compared() -> None:
    """The phases of a step leave out what is before it, which the share of the engines contains."""
    balance = overlap_balance({**step(0.1, 1.0), TRAINER_IDLE: 0.4, ENGINES_IDLE: 0.2})
    assert balance is not None
    assert (balance.waiting, balance.most_speedup) == (0.4, pytest.approx(1.4))


@pytest.mark.parametrize(("idle", "speedup"), [(0.0, 1.75), (0.35, 1.4), (0.75, 1.0), (0.9, 1.0)])
def test_engines_that_idle_gain_nothing(idle: float, speedup: float) -> None:
    """Three quarters of the time train, and one minus the idle share generates: in turns both would take the sum."""
    balance = overlap_balance({**step(0.25, 1.0), ENGINES_IDLE: idle})
    assert balance is not None
    assert balance.most_speedup == pytest.approx(speedup)


def test_lag_that_costs_more_than_overlap_gains_is_found_after_a_while() -> None:
    tracker = FindingTracker(LIMITS, None)
    costly = step(0.6, 0.5)
    assert tracker.observe(1, costly) == tracker.observe(2, costly) == []
    (found,) = tracker.observe(3, costly)
    assert (found.kind, found.first_step) == ("staleness_outweighs_overlap", 1)
    assert "50% of a fresh one" in found.text
    assert "at most 1.40 times" in found.text


def test_synchronous_steps_have_no_balance() -> None:
    assert overlap_balance({STEP_S: 10.0, WAIT_S: 9.0}) is None

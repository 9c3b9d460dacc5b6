# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from nemo_rl_moe.metrics import PhaseClock


class ClockByHand:
    """Shows what a test has set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_may_lie_in_each_other() -> None:
    hand = ClockByHand()
    clock = PhaseClock(hand)
    with clock.phase("step"):
        with clock.phase("generation"):
            hand.now += 2.0
        hand.now += 0.5
        with clock.phase("train"):
            hand.now += 4.0
        with clock.phase("generation"):
            hand.now += 3.0
    assert clock.metrics() == {
        "timing/step/seconds": 9.5,
        "timing/generation/seconds": 5.0,
        "timing/train/seconds": 4.0,
    }


def test_tokens_a_second_are_over_all_of_a_phase() -> None:
    hand = ClockByHand()
    clock = PhaseClock(hand)
    for seconds, tokens in ((2.0, 30), (3.0, 20)):
        with clock.phase("generation"):
            hand.now += seconds
        clock.count_tokens("generation", tokens)
    assert clock.metrics() == {"timing/generation/seconds": 5.0, "timing/generation/tokens_per_second": 10.0}


def test_a_phase_that_fails_counts_and_lets_the_error_through() -> None:
    hand = ClockByHand()
    clock = PhaseClock(hand)

    def fail() -> None:
        hand.now += 1.5
        raise KeyError("x")

    with pytest.raises(KeyError), clock.phase("rewards"):
        fail()
    assert clock.metrics() == {"timing/rewards/seconds": 1.5}


def test_nothing_measured_gives_nothing() -> None:
    assert PhaseClock().metrics() == {}


def test_a_phase_without_tokens_has_no_speed() -> None:
    hand = ClockByHand()
    clock = PhaseClock(hand)
    with clock.phase("generation"):
        hand.now += 1.0
    clock.count_tokens("generation", 0)
    assert clock.metrics() == {"timing/generation/seconds": 1.0}


def test_the_real_clock_goes_forward() -> None:
    clock = PhaseClock()
    with clock.phase("train"):
        pass
    assert clock.metrics()["timing/train/seconds"] > 0

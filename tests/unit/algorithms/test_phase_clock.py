# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import pytest

from nemo_rl_moe.metrics import PhaseClock


class ClockByHand(PhaseClock):
    """Phases by a clock that shows what a test has set."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(lambda: self.now)


def test_phases_add_up_and_may_lie_in_each_other() -> None:
    clock = ClockByHand()
    assert clock.metrics() == {}
    with clock.phase("step"):
        with clock.phase("generation"):
            clock.now += 2.0
        clock.now += 0.5
        with clock.phase("train"):
            clock.now += 4.0
        with clock.phase("generation"):
            clock.now += 3.0
    assert clock.metrics() == {
        "timing/step/seconds": 9.5,
        "timing/generation/seconds": 5.0,
        "timing/train/seconds": 4.0,
    }


@pytest.mark.parametrize(
    ("tokens", "speed"),
    [([30, 20], {"timing/generation/tokens_per_second": 10.0}), ([0, 0], {})],
    ids=["over all of a phase", "none without tokens"],
)
def test_tokens_a_second(tokens: list[int], speed: dict[str, float]) -> None:
    clock = ClockByHand()
    for seconds, count in zip((2.0, 3.0), tokens, strict=True):
        with clock.phase("generation"):
            clock.now += seconds
        clock.count_tokens("generation", count)
    assert clock.metrics() == {"timing/generation/seconds": 5.0} | speed


def test_a_phase_that_fails_counts_and_lets_the_error_through() -> None:
    clock = ClockByHand()

    def fail() -> None:
        clock.now += 1.5
        raise KeyError("x")

    with pytest.raises(KeyError), clock.phase("rewards"):
        fail()
    assert clock.metrics() == {"timing/rewards/seconds": 1.5}

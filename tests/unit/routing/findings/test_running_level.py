# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np

from nemo_rl_moe.routing.findings.level_shift import LEAST_VALUES, WINDOW, RunningLevel


def left(values: list[float], *, least: float = 0.02, upwards: bool = False) -> list[int]:
    """Places of the values that leave the level."""
    level = RunningLevel(least)
    return [place for place, value in enumerate(values) if level.leaves(value, upwards=upwards)]


def test_a_drop_leaves_the_level_while_it_lasts() -> None:
    steady = [0.95, 0.951, 0.949, 0.95, 0.952]
    assert left([*steady, 0.9, 0.9, 0.95, 0.9]) == [5, 6, 8]
    assert left([*steady, 1.0, 0.935]) == [], "upwards, or by too little"
    assert left([*steady, 1.0, 1.0], upwards=True) == [5, 6]


def test_there_is_no_level_of_few_values() -> None:
    assert left([1.0] * (LEAST_VALUES - 1) + [0.0]) == []
    assert left([1.0] * LEAST_VALUES + [0.0]) == [LEAST_VALUES]
    assert math.isnan(RunningLevel(0.1).median)


def test_wide_spread_hides_what_would_leave_a_narrow_one() -> None:
    assert left([0.9, 0.8, 0.95, 0.85, 0.75, 0.88, 0.6]) == []
    assert left([0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.6]) == [6]


def test_a_level_that_falls_slowly_is_followed() -> None:
    assert left([1 - 0.004 * step for step in range(100)]) == []


def test_a_lasting_change_becomes_the_level() -> None:
    places = left([1.0] * 10 + [0.5] * (2 * WINDOW) + [0.2])
    assert places == [*range(10, 10 + WINDOW + 1), 10 + 2 * WINDOW]


def test_noise_does_not_leave_its_level() -> None:
    generator = np.random.default_rng(1)
    values = 0.9 + 0.01 * generator.standard_normal(20000)
    assert left(values.tolist()) == []


def test_values_that_are_not_finite_are_no_part_of_the_level() -> None:
    steady = [0.95, 0.951, 0.949, 0.95, 0.952]
    for odd in (math.nan, math.inf, -math.inf):
        assert left([odd, *steady, odd, 0.9, odd]) == [7]

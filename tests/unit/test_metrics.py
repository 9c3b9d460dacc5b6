# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from nemo_rl_moe.metrics import MetricSeries, Reduction, concatenate

VALUES = (0.5, -2.0, 4.0, 1.5)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (Reduction.SUM, 4.0),
        (Reduction.SHARE, 4.0),
        (Reduction.SEQUENCE_SHARE, 4.0),
        (Reduction.MIN, -2.0),
        (Reduction.MAX, 4.0),
    ],
)
def test_reduce(reduction: Reduction, expected: float) -> None:
    assert MetricSeries(VALUES, reduction).reduce() == expected


@pytest.mark.parametrize("reduction", Reduction)
def test_one_value_stands_for_itself_and_none_for_nothing(reduction: Reduction) -> None:
    assert MetricSeries((0.1,), reduction).reduce() == 0.1
    assert math.isnan(MetricSeries((), reduction).reduce())


def test_sum_does_not_depend_on_the_order() -> None:
    values = (1e16, 1.0, -1e16, 1.0)
    assert MetricSeries(values, Reduction.SUM).reduce() == 2.0
    assert MetricSeries(values[::-1], Reduction.SHARE).reduce() == 2.0


def test_concatenate_keeps_every_value_in_order() -> None:
    parts = [MetricSeries(values, Reduction.SUM) for values in ((1.0, 2.0), (), (6.0,))]
    joined = concatenate(iter(parts))
    assert joined == MetricSeries((1.0, 2.0, 6.0), Reduction.SUM)
    assert joined.reduce() == 9.0


def test_concatenate_refuses_what_does_not_belong_together() -> None:
    with pytest.raises(ValueError, match=r"one metric needs one reduction, got \['max', 'sum'\]"):
        concatenate([MetricSeries((1.0,), Reduction.SUM), MetricSeries((1.0,), Reduction.MAX)])
    with pytest.raises(ValueError, match=r"one metric needs one reduction, got \[\]"):
        concatenate([])

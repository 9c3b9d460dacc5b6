# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The split of the mismatch between rollout and training, against hand-worked values and by its properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.routing.metrics.mismatch_split import (
    RatioLimits,
    gap_metrics,
    split_gap,
    split_metrics,
    variance_shares,
)

LOGPROBS = st.floats(-30, 0, width=32)


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS, LOGPROBS, LOGPROBS), min_size=1, max_size=20))
def test_parts_sum_to_the_gap(rows: list[tuple[float, ...]]) -> None:
    generation, before, own, replayed = np.array(rows, dtype=np.float32).T
    for parts in (split_gap(generation, before, own), split_gap(generation, before, own, replayed)):
        total = parts.pop("total")
        np.testing.assert_allclose(sum(parts.values()), total, atol=1e-12)
        np.testing.assert_array_equal(total, own.astype(np.float64) - generation)
        shares = variance_shares(parts | {"total": total})
        if np.ptp(total) > 1e-3:
            assert sum(shares.values()) == pytest.approx(1, abs=1e-6)


def test_parts_of_one_token() -> None:
    generation, before, own, replayed = (np.array([value]) for value in (-2.0, -1.5, -1.0, -1.25))
    assert split_gap(generation, before, own) == {"total": [1.0], "numerics": [0.5], "routing": [0.5]}
    moved = split_gap(generation, before, own, replayed)
    assert moved == {"total": [1.0], "numerics": [0.5], "routing": [0.25], "staleness": [0.25]}


def test_sizes_of_a_gap() -> None:
    gap = np.log([0.5, 1.0, 2.0, 1.0])
    metrics = gap_metrics(gap, RatioLimits(0.8, 2.5))
    assert metrics == pytest.approx(
        {
            "mean_abs": math.log(2) / 2,
            "max_abs": math.log(2),
            "kl": ((0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2))) / 4,
            "mult_prob_error": (2 + 1 + 2 + 1) / 4,
            "effective_samples": 4.5**2 / (4 * (0.25 + 1 + 4 + 1)),
            "clip_fraction": 0.25,
        }
    )
    assert "clip_fraction" not in gap_metrics(gap)
    assert gap_metrics(np.zeros(3))["effective_samples"] == 1


def test_no_token_makes_a_metric_infinite() -> None:
    assert all(math.isfinite(value) for value in gap_metrics(np.array([1e4, -1e4, 0.0])).values())


def test_shares_of_the_variance() -> None:
    """Independent parts share as their variances do; a part that takes back what another adds counts below 0."""
    routing, numerics = np.array([1.0, -1.0, 1.0, -1.0]), np.array([2.0, 2.0, -2.0, -2.0])
    assert variance_shares({"total": routing + numerics, "routing": routing, "numerics": numerics}) == pytest.approx(
        {"routing": 0.2, "numerics": 0.8}
    )
    against = {"total": routing, "routing": 2 * routing, "numerics": -routing}
    assert variance_shares(against) == pytest.approx({"routing": 2.0, "numerics": -1.0})
    assert variance_shares({"total": np.ones(3), "routing": np.ones(3)}) == {}


def test_each_part_has_all_metrics() -> None:
    parts = split_gap(np.array([-1.0, -2.0]), np.array([-1.5, -2.0]), np.array([-1.0, -3.0]))
    metrics = split_metrics(parts, RatioLimits(0.8, 1.2))
    assert metrics["clip_fraction_routing"] == 1
    assert metrics["clip_fraction_numerics"] == 0.5
    assert metrics["max_abs_total"] == 1
    assert metrics["variance_share_routing"] + metrics["variance_share_numerics"] == pytest.approx(1)

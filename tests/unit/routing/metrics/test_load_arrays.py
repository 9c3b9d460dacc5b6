# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nemo_rl_moe.routing.metrics.load_arrays import (
    coefficient_of_variation,
    dead,
    excess_coefficient_of_variation,
    highest_coefficient_of_variation_by_chance,
    load_distance,
    null_variance,
    overload_of_steps,
    utilization,
)
from nemo_rl_moe.routing.metrics.load_statistics import layer_statistics
from tests.support.made_runs import random_counts

matrices = arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.integers(0, 10**6))


@given(counts=matrices, topk=st.integers(1, 8))
def test_numbers_are_those_of_the_metrics(counts: np.ndarray, topk: int) -> None:
    topk = min(topk, counts.shape[1])
    expected = layer_statistics(torch.from_numpy(counts), topk)
    np.testing.assert_allclose(utilization(counts).ravel(), expected.utilization.numpy(), rtol=1e-12)
    cv, variance = coefficient_of_variation(counts), null_variance(counts, topk)
    np.testing.assert_allclose(cv, expected.cv, rtol=1e-12, atol=1e-12)
    assert expected.cv_null is not None
    assert expected.cv_excess is not None
    np.testing.assert_allclose(np.sqrt(variance), expected.cv_null, rtol=1e-12)
    np.testing.assert_allclose(excess_coefficient_of_variation(cv, variance), expected.cv_excess, rtol=1e-6, atol=1e-6)
    has_load = counts.sum(1) > 0
    dead_frac = np.where(has_load, dead(counts).mean(1), 1.0)
    np.testing.assert_allclose(dead_frac, expected.dead_expert_frac, rtol=1e-12)


def test_steps_are_taken_each_for_itself() -> None:
    counts = random_counts(5, 3, 8, 40)
    for numbers in (
        coefficient_of_variation(counts),
        null_variance(counts, 2),
        overload_of_steps(counts, 4),
    ):
        assert numbers.shape == (5, 3)
    np.testing.assert_array_equal(overload_of_steps(counts, 4)[2], overload_of_steps(counts[2], 4))
    np.testing.assert_array_equal(coefficient_of_variation(counts)[4], coefficient_of_variation(counts[4]))


def test_a_layer_without_load_has_no_dead_experts() -> None:
    assert dead(np.array([[0, 0], [0, 3]])).tolist() == [[False, False], [True, False]]


def test_overload_of_hand_worked_counts() -> None:
    counts = np.array([[4, 2, 1, 1], [0, 0, 0, 0], [8, 0, 0, 0]])
    np.testing.assert_allclose(overload_of_steps(counts, 1), [1, 1, 1])
    # Ranks hold experts 0, 1 and 2, 3: 6 and 2 of 8.
    np.testing.assert_allclose(overload_of_steps(counts, 2), [1.5, 1, 2])
    np.testing.assert_allclose(overload_of_steps(counts, 4), [2, 1, 4])


@pytest.mark.parametrize(
    ("num_experts", "topk", "num_tokens"), [(4, 1, 8), (8, 2, 4), (8, 2, 64), (32, 4, 4), (64, 8, 32)]
)
def test_chance_exceeds_its_bound_about_as_often_as_it_says(num_experts: int, topk: int, num_tokens: int) -> None:
    counts = random_counts(20_000 * 64 // (num_tokens * num_experts), 1, num_experts, num_tokens, topk)
    cv = coefficient_of_variation(counts)
    for probability in (0.05, 0.01):
        bound = highest_coefficient_of_variation_by_chance(counts, topk, probability)
        share = float((cv > bound).mean())
        assert share < 2 * probability + 0.01
    # A bound that chance never reaches would hide what is real.
    assert (cv > highest_coefficient_of_variation_by_chance(counts, topk, 0.3)).mean() > 0.1
    assert (cv <= highest_coefficient_of_variation_by_chance(counts, topk, 1e-9)).all()


def test_distance_of_loads_beyond_chance() -> None:
    some = np.array([[400, 0, 400, 0], [200, 200, 200, 200], [0, 0, 0, 0]])
    others = np.array([[200, 200, 200, 200], [210, 190, 200, 200], [1, 2, 3, 4]])
    # Utilizations differ by 1 throughout, 4 / 3; by chance (1 - 2 / 4) * 4 / 800 of either, more than in the second.
    expected = [(4 / 3 - 2 * 0.0025) ** 0.5, 0, 0]
    np.testing.assert_allclose(load_distance(some, others, 2), expected, rtol=1e-12)

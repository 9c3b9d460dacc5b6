# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Evenness of counts, such as utilization and coefficient of variation, in numpy.

It imports no torch, because the driver, the report and the terminal view use it and start without torch.
"""

import math
from statistics import NormalDist

import numpy as np

from nemo_rl_moe.shapes import Bool, Float, Int, Num


def utilization(counts: Num[np.ndarray, "*steps layers experts"]) -> Float[np.ndarray, "*steps layers experts"]:
    """Return `E * c / sum c`: 1 is the fair share, 0 is dead. A layer without load has 0.

    The multiplication and the division round at most once each, so equal loads have equal bits in any layout.
    """
    totals = counts.sum(-1)
    shares: Float[np.ndarray, "*steps layers experts"]
    shares = counts * counts.shape[-1] / (totals + (totals == 0))[..., None]
    return shares


def coefficient_of_variation(counts: Num[np.ndarray, "*steps layers experts"]) -> Float[np.ndarray, "*steps layers"]:
    """Return the sample standard deviation (ddof 1) of the loads over their mean. 0 without load or with one expert."""
    return deviation_of_utilization(utilization(counts)) * (counts.sum(-1) > 0)


def deviation_of_utilization(shares: Float[np.ndarray, "*steps layers experts"]) -> Float[np.ndarray, "*steps layers"]:
    """Return the coefficient of variation of loads, from their utilization. Only valid in layers with load."""
    # The mean of the utilizations is 1: no large numbers are subtracted, and balance gives exactly 0.
    off = shares - 1
    deviation: Float[np.ndarray, "*steps layers"] = np.sqrt((off * off).sum(-1) / max(shares.shape[-1] - 1, 1))
    return deviation


def null_variance(
    counts: Num[np.ndarray, "*steps layers experts"], topk: float | Float[np.ndarray, " layers"]
) -> Float[np.ndarray, "*steps layers"]:
    """Return the mean square of the coefficient of variation under random routing, `(1 - k / E) * E / (T * k)`.

    `T` is the number of tokens, `k` the top-k, `E` the number of experts.
    """
    num_experts, totals = counts.shape[-1], counts.sum(-1)
    variance: Float[np.ndarray, "*steps layers"] = (1 - topk / num_experts) * num_experts / (totals + (totals == 0))
    return np.maximum(variance, 0) * (totals > 0)


def excess_coefficient_of_variation(
    cv: Float[np.ndarray, "*steps layers"], null_variance: Float[np.ndarray, "*steps layers"]
) -> Float[np.ndarray, "*steps layers"]:
    """Return the imbalance beyond sampling noise, `sqrt(max(0, cv^2 - null_variance))`."""
    excess: Float[np.ndarray, "*steps layers"] = np.sqrt(np.maximum(cv * cv - null_variance, 0))
    return excess


def load_distance(
    counts: Int[np.ndarray, "*steps layers experts"], others: Int[np.ndarray, "*steps layers experts"], topk: int
) -> Float[np.ndarray, "*steps layers"]:
    """Return the distance between two loads beyond sampling noise, from the differences of their utilizations.

    It is `sqrt(max(0, sum_e (u_e - v_e)^2 / (E - 1) - null_u - null_v))` of the utilizations `u` and `v` and their
    `null_variance`. Both variances are subtracted, because they add up for loads of independent tokens. A layer
    without load has the distance 0.
    """
    difference = utilization(counts) - utilization(others)
    squared = (difference * difference).sum(-1) / max(counts.shape[-1] - 1, 1)
    null = null_variance(counts, topk) + null_variance(others, topk)
    known = (counts.sum(-1) > 0) & (others.sum(-1) > 0)
    return excess_coefficient_of_variation(squared**0.5 * known, null)


def highest_coefficient_of_variation_by_chance(
    counts: Int[np.ndarray, "*steps layers experts"], topk: int, probability: float
) -> Float[np.ndarray, "*steps layers"]:
    """Return the coefficient of variation that random routing exceeds with about this probability (below 0.5).

    The sum of squared deviations over its expectation is approximately chi-square with `E - 1` degrees of freedom over
    `E - 1`. Its quantile is the approximation of Wilson and Hilferty (1931).
    """
    num_experts = counts.shape[-1]
    degrees = max(num_experts - 1, 1)
    deviation = NormalDist().inv_cdf(1 - probability)
    quantile = (1 - 2 / (9 * degrees) + deviation * math.sqrt(2 / (9 * degrees))) ** 3
    # null_variance omits that the sample variance divides by E - 1.
    return np.sqrt(quantile * num_experts / degrees * null_variance(counts, topk))


def dead(counts: Int[np.ndarray, "*steps layers experts"]) -> Bool[np.ndarray, "*steps layers experts"]:
    """Return a mask of experts without any token. All False in a layer without tokens."""
    found: Bool[np.ndarray, "*steps layers experts"] = (counts == 0) & (counts.sum(-1, keepdims=True) > 0)
    return found


def overload_of_steps(
    counts: Int[np.ndarray, "*steps layers experts"], expert_parallel_size: int
) -> Float[np.ndarray, "*steps layers"]:
    """Return the load of the busiest expert-parallel rank over the mean rank's, for all tokens of a step together.

    The metric `avg_overload_factor` is higher, because it is a mean over microbatches, in which chance weighs more.
    """
    loads = counts.reshape(*counts.shape[:-1], expert_parallel_size, -1).sum(-1)
    totals = loads.sum(-1)
    return np.where(totals > 0, loads.max(-1) * expert_parallel_size / np.maximum(totals, 1), 1.0)

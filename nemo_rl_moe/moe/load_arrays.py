# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load statistics of numpy counts, for all steps of a run at once; `load_statistics` has those of one step in torch.

The report and the terminal view use them, which start without torch.
"""

import math
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Int


def utilization(counts: Int[np.ndarray, "*steps layers experts"]) -> Float[np.ndarray, "*steps layers experts"]:
    """Load over fair share, `E * c / sum c`: 1 is fair, 0 dead; 0 for all experts of a layer without load."""
    totals = counts.sum(-1, keepdims=True)
    return counts * (counts.shape[-1] / np.maximum(totals, 1))


def coefficient_of_variation(
    counts: Int[np.ndarray, "*steps layers experts"],
) -> Float[np.ndarray, "*steps layers"]:
    """Sample standard deviation (ddof 1) of the loads over their mean; 0 without load or with one expert."""
    num_experts = counts.shape[-1]
    deviations = np.where(counts.sum(-1, keepdims=True) > 0, utilization(counts) - 1, 0.0)
    variance: Float[np.ndarray, "*steps layers"] = np.square(deviations).sum(-1) / max(num_experts - 1, 1)
    return np.sqrt(variance)


def null_coefficient_of_variation(
    counts: Int[np.ndarray, "*steps layers experts"], topk: int
) -> Float[np.ndarray, "*steps layers"]:
    """Coefficient of variation under random routing of the same tokens, `sqrt((1 - k / E) * E / (T * k))`."""
    num_experts, totals = counts.shape[-1], counts.sum(-1)
    null = np.sqrt(max(0.0, 1 - topk / num_experts) * num_experts / np.maximum(totals, 1))
    return np.where(totals > 0, null, 0.0)


def excess_coefficient_of_variation(
    counts: Int[np.ndarray, "*steps layers experts"], topk: int
) -> Float[np.ndarray, "*steps layers"]:
    """Imbalance beyond sampling noise, `sqrt(max(0, cv^2 - cv_null^2))`."""
    cv, null = coefficient_of_variation(counts), null_coefficient_of_variation(counts, topk)
    return np.sqrt(np.maximum(0.0, cv**2 - null**2))


def highest_coefficient_of_variation_by_chance(
    counts: Int[np.ndarray, "*steps layers experts"], topk: int, probability: float
) -> Float[np.ndarray, "*steps layers"]:
    """Quantile of the coefficient of variation under random routing: it is exceeded with about this probability.

    The sum of squared deviations over its expectation follows chi-square with `E - 1` degrees of freedom over `E - 1`;
    its quantile is approximated as by Wilson and Hilferty (1931).

    Args:
        counts: Assignments.
        topk: Experts that each token is routed to.
        probability: Below 0.5.
    """
    num_experts = counts.shape[-1]
    degrees = max(num_experts - 1, 1)
    deviation = NormalDist().inv_cdf(1 - probability)
    quantile = (1 - 2 / (9 * degrees) + deviation * math.sqrt(2 / (9 * degrees))) ** 3
    # The null leaves out that the sample variance divides by E - 1.
    return math.sqrt(quantile * num_experts / degrees) * null_coefficient_of_variation(counts, topk)


def dead(counts: Int[np.ndarray, "*steps layers experts"]) -> Bool[np.ndarray, "*steps layers experts"]:
    """Experts without any token, in layers with tokens."""
    found: Bool[np.ndarray, "*steps layers experts"] = (counts == 0) & (counts.sum(-1, keepdims=True) > 0)
    return found


def overload_of_steps(
    counts: Int[np.ndarray, "*steps layers experts"], expert_parallel_size: int
) -> Float[np.ndarray, "*steps layers"]:
    """Load of the busiest expert-parallel rank over that of the mean one, for the tokens of a whole step together.

    The metric `avg_overload_factor` is the mean over microbatches, where chance weighs more, and is higher.

    Args:
        counts: Assignments; rank r of R would hold the experts `r * E / R .. (r + 1) * E / R - 1`.
        expert_parallel_size: R, a divisor of E.
    """
    loads = counts.reshape(*counts.shape[:-1], expert_parallel_size, -1).sum(-1)
    totals = loads.sum(-1)
    return np.where(totals > 0, loads.max(-1) * expert_parallel_size / np.maximum(totals, 1), 1.0)

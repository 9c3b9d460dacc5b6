# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of the importance-sampling correction, by hand."""

import math

import pytest
import torch

from nemo_rl_moe.algorithms.losses.policy_gradient import importance_ratio, importance_weights, out_of_bounds
from tests.unit.algorithms.policy_loss_reference import config_of

RATIOS = torch.tensor([0.0, 0.49, 0.5, 1.0, 2.0, 2.01, 1e9], dtype=torch.float64)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ("none", [1.0] * 7),
        ("truncated", [0.0, 0.49, 0.5, 1.0, 2.0, 2.0, 2.0]),
        ("icepop", [0.0, 0.0, 0.5, 1.0, 2.0, 0.0, 0.0]),
    ],
)
def test_weights(correction: str, weights: list[float]) -> None:
    assert importance_weights(RATIOS, config_of(importance_sampling_correction=correction)).tolist() == weights


@pytest.mark.parametrize(("correction", "indices"), [("truncated", [5, 6]), ("icepop", [0, 1, 5, 6])])
def test_out_of_bounds(correction: str, indices: list[int]) -> None:
    found = out_of_bounds(RATIOS, config_of(importance_sampling_correction=correction))
    assert found.nonzero().flatten().tolist() == indices


def test_ratio_is_training_over_generation_and_constant() -> None:
    training = torch.tensor([0.6, 0.1], dtype=torch.float64).log().requires_grad_()
    generation = torch.tensor([0.2, 0.4], dtype=torch.float64).log()
    ratio = importance_ratio(training, generation)
    assert ratio.tolist() == pytest.approx([3.0, 0.25])
    assert not ratio.requires_grad


@pytest.mark.parametrize("correction", ["truncated", "icepop"])
def test_nan_stays_nan(correction: str) -> None:
    weights = importance_weights(torch.tensor([math.nan]), config_of(importance_sampling_correction=correction))
    assert weights.isnan().all()

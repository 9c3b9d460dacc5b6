# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of the importance-sampling correction, by hand."""

from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.ratios import importance_ratios
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.rl.corrections import CORRECTIONS, out_of_bounds
from tests.unit.algorithms.policy_loss_reference import config_of


def importance_weights(ratio: torch.Tensor, bounded: torch.Tensor, config: PolicyGradientLossConfig) -> torch.Tensor:
    return CORRECTIONS[config.importance_sampling_correction].weights(ratio, bounded, config)


RATIOS = torch.tensor([0.0, 0.49, 0.5, 1.0, 2.0, 2.01, 1e9], dtype=torch.float64)


@pytest.mark.parametrize(
    ("correction", "lower", "weights"),
    [
        ("none", None, [1.0] * 7),
        ("truncated", None, [0.0, 0.49, 0.5, 1.0, 2.0, 2.0, 2.0]),
        ("truncated", 0.5, [0.5, 0.5, 0.5, 1.0, 2.0, 2.0, 2.0]),
        ("icepop", None, [0.0, 0.0, 0.5, 1.0, 2.0, 0.0, 0.0]),
        ("icepop", 1.0, [0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0]),
    ],
)
def test_weights(correction: str, lower: float | None, weights: list[float]) -> None:
    config = config_of(importance_sampling_correction=correction, importance_sampling_ratio_min=lower)
    assert importance_weights(RATIOS, RATIOS, config).tolist() == weights


@pytest.mark.parametrize(
    ("correction", "lower", "indices"),
    [("truncated", None, [5, 6]), ("truncated", 0.5, [0, 1, 5, 6]), ("icepop", None, [0, 1, 5, 6])],
)
def test_out_of_bounds(correction: str, lower: float | None, indices: list[int]) -> None:
    config = config_of(importance_sampling_correction=correction, importance_sampling_ratio_min=lower)
    assert out_of_bounds(RATIOS, config).nonzero().flatten().tolist() == indices


def three_sequences() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ratios of the tokens 2, 4; 3, 0.25; 0.5. Their products are 8, 0.75 and 0.5, the geometric means of that."""
    mask = torch.tensor([[True, True, False], [True, False, True], [False, True, False]])
    ratios = torch.tensor([[2.0, 4.0, 1.0], [3.0, 1.0, 0.25], [1.0, 0.5, 1.0]], dtype=torch.float64)
    generation = torch.full((3, 3), 0.1, dtype=torch.float64).log()
    # What stands where masked is finite and counts for nothing.
    return (generation + ratios.log()).where(mask, -50.0), generation, mask


def weights_of(**settings: Any) -> list[float]:
    prev, generation, mask = three_sequences()
    config = config_of(**settings)
    weights = importance_weights(*importance_ratios(prev, generation, mask, config), config)
    return [float(value) for value in weights[mask]]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        # Products 8 (truncated to 2), 0.75 and 0.5 (raised to 0.6).
        (("truncated", "sequence", 0.6, 2.0), [2.0, 2.0, 0.75, 0.75, 0.6]),
        (("icepop", "sequence", 0.6, 2.0), [0.0, 0.0, 0.75, 0.75, 0.0]),
        # Geometric means sqrt(8) = 2.83, sqrt(0.75) = 0.87 and 0.5; the weights stay those of the tokens.
        (("sequence_mask", "token", 0.6, 3.0), [2.0, 4.0, 3.0, 0.25, 0.0]),
        (("sequence_mask", "token", 0.9, 2.0), [0.0] * 5),
    ],
)
def test_weights_of_sequences_by_hand(settings: tuple[str, str, float, float], weights: list[float]) -> None:
    names = ("correction", "level", "ratio_min", "ratio_max")
    chosen = {f"importance_sampling_{name}": value for name, value in zip(names, settings, strict=True)}
    assert weights_of(**chosen) == pytest.approx(weights, rel=1e-12)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ratios and their bounds, by hand and at their edges."""

import math

import pytest
import torch

from nemo_rl_moe.algorithms.losses.divergence import LARGEST_LOG_RATIO, bounded_exp
from nemo_rl_moe.algorithms.losses.ratios import probability_ratio
from nemo_rl_moe.rl.aggregation import sequence_mean
from nemo_rl_moe.rl.objectives import both_bounds, surrogate_bounds
from tests.unit.algorithms.policy_loss_reference import config_of

INFINITY = float("inf")


def test_bounded_exp_is_exp_up_to_its_bound() -> None:
    exponents = torch.tensor([-INFINITY, -1000.0, -1.0, 0.0, 19.9, 20.0, 21.0, 1e30, INFINITY], requires_grad=True)
    values = bounded_exp(exponents)
    torch.testing.assert_close(values, exponents.detach().clamp(max=LARGEST_LOG_RATIO).exp())
    (gradient,) = torch.autograd.grad(values.sum(), exponents)
    assert torch.equal(gradient[:6], values[:6])
    assert torch.equal(gradient[6:], torch.zeros(3))


def test_sequence_mean_is_over_valid_tokens() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0], [math.nan, 3.0, math.inf], [7.0, 8.0, 9.0]])
    mask = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])
    assert sequence_mean(values, mask).tolist() == [[2.5], [3.0], [0.0]]


def test_ratios_of_tokens_and_of_sequences() -> None:
    logprobs = torch.tensor([[0.8, 0.2, 0.3]], dtype=torch.float64).log()
    prev = torch.tensor([[0.2, 0.2, 0.1]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]])
    of_tokens = probability_ratio(logprobs, prev, mask, of_sequences=False)
    assert of_tokens[mask].tolist() == pytest.approx([4.0, 1.0])
    of_sequences = probability_ratio(logprobs, prev, mask, of_sequences=True)
    assert of_sequences[mask].tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("dual_clip", "lower", "upper"),
    [(None, [0.8, 0.0, 0.0], [INFINITY, INFINITY, 1.3]), (3.0, [0.8, 0.0, 0.0], [3.0, INFINITY, 1.3])],
)
def test_bounds_follow_the_sign_of_the_advantage(
    dual_clip: float | None, lower: list[float], upper: list[float]
) -> None:
    advantages = torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64)
    bounds = surrogate_bounds(advantages, config_of(ratio_clip_c=dual_clip))
    assert bounds.lower.tolist() == [lower]
    assert bounds.upper.tolist() == [upper]


def test_both_bounds_do_not() -> None:
    bounds = both_bounds(torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64), config_of())
    assert bounds.lower.tolist() == [[0.8] * 3]
    assert bounds.upper.tolist() == [[1.3] * 3]

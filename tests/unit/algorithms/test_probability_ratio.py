# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Exponentials with a bound, and means over sequences, by hand and at their edges."""

import math

import torch

from nemo_rl_moe.algorithms.losses.divergence import LARGEST_LOG_RATIO, bounded_exp
from nemo_rl_moe.rl.aggregation import sequence_mean

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

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The estimators against the exact divergence of two small distributions, in value and in gradient."""

import math

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import kl_estimate

LOGITS = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.4, 0.9, -1.5], dtype=torch.float64).log_softmax(0)


def expected_estimate(logits: Tensor, kind: str) -> Tensor:
    """Over all tokens that the policy may draw; what draws them has no gradient."""
    logprobs = logits.log_softmax(0)
    return (logprobs.detach().exp() * kl_estimate(logprobs, REFERENCE, kind)).sum()


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def gradient_of(value: Tensor, logits: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: str) -> None:
    exact = divergence(LOGITS.log_softmax(0), REFERENCE)
    assert expected_estimate(LOGITS, kind).item() == pytest.approx(exact.item(), rel=1e-14)


def test_expected_gradients_are_those_of_the_docstring() -> None:
    logits = LOGITS.clone().requires_grad_()
    of_k1, of_k2, of_k3 = (gradient_of(expected_estimate(logits, kind), logits) for kind in ("k1", "k2", "k3"))
    logprobs = logits.log_softmax(0)
    torch.testing.assert_close(of_k1, torch.zeros_like(of_k1), rtol=0, atol=1e-15)
    torch.testing.assert_close(of_k2, gradient_of(divergence(logprobs, REFERENCE), logits), rtol=1e-13, atol=0)
    torch.testing.assert_close(
        of_k3, gradient_of(divergence(REFERENCE, logits.log_softmax(0)), logits), rtol=1e-13, atol=0
    )


def test_by_hand() -> None:
    logprobs = torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64).log()
    reference = torch.tensor([0.25, 0.5, 0.1], dtype=torch.float64).log()
    two = math.log(2)
    assert kl_estimate(logprobs, reference, "k1").tolist() == pytest.approx([two, -two, 0])
    assert kl_estimate(logprobs, reference, "k2").tolist() == pytest.approx([two**2 / 2, two**2 / 2, 0])
    assert kl_estimate(logprobs, reference, "k3").tolist() == pytest.approx([two - 0.5, 1 - two, 0])


def test_small_differences_keep_their_digits_in_float32() -> None:
    # d^2 / 2 for a d of 1e-3; exp(d) - 1 - d in float32 would be wrong in the second digit.
    found = kl_estimate(torch.tensor(0.0), torch.tensor(1e-3), "k3").item()
    assert found == pytest.approx(1e-6 / 2 * (1 + 1e-3 / 3), rel=2e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [-1e4, -50.0, 19.0, 21.0, 1e4])
def test_far_apart_is_finite_and_never_pulls_the_wrong_way(kind: str, gap: float) -> None:
    logprobs = torch.tensor(-2e4, requires_grad=True)
    value = kl_estimate(logprobs, logprobs.detach() + gap, kind)
    gradient = gradient_of(value, logprobs)
    assert value.isfinite()
    assert gradient.isfinite()
    # Where the policy gives less than the reference, more must not cost more. k1 always pushes down: see its docstring.
    assert kind == "k1" or gradient.item() * gap <= 0

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The estimators against the exact divergence of two small distributions, in value and in gradient."""

import math

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import divergence_of_responses, kl_estimate, reference_divergence
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from tests.unit.algorithms.policy_loss_reference import config_of, inputs_of

LOGITS = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.4, 0.9, -1.5], dtype=torch.float64).log_softmax(0)
# What the policy was when it sampled the tokens, after which it has moved.
BEFORE = torch.tensor([0.9, -0.3, 0.2, -0.6], dtype=torch.float64).log_softmax(0)


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


def gradient_of_the_loss(kind: str, gradient: str, before: Tensor | None) -> Tensor:
    """Expected gradient to the logits, over the tokens that `before`, or the policy itself, draws."""
    config = config_of(
        reference_policy_kl_penalty=0.3,
        reference_policy_kl_type=kind,
        reference_policy_kl_gradient=gradient,
        kl_output_clamp_value=None,
    )
    logits = LOGITS.clone().requires_grad_()
    sampled = LOGITS.log_softmax(0) if before is None else before
    expected = torch.zeros_like(LOGITS)
    for token in range(len(LOGITS)):
        inputs = inputs_of(
            logits.log_softmax(0)[token].view(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            advantages=torch.zeros(1, dtype=torch.float64),
            prev_logprobs=sampled[token].view(1, 1),
            generation_logprobs=sampled[token].view(1, 1),
            reference_logprobs=REFERENCE[token].view(1, 1),
        )
        loss = PolicyGradientLoss(config, prev_is_current=before is None)(inputs).loss
        expected += sampled[token].exp() * gradient_of(loss, logits)
    return expected / 0.3


@pytest.mark.parametrize("before", [None, BEFORE], ids=["on policy", "off policy"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_loss_has_the_gradient_of_the_divergence_where_asked_for(kind: str, before: Tensor | None) -> None:
    logits = LOGITS.clone().requires_grad_()
    exact = gradient_of(divergence(logits.log_softmax(0), REFERENCE), logits)
    torch.testing.assert_close(gradient_of_the_loss(kind, "divergence", before), exact, rtol=1e-12, atol=1e-15)
    # As it is, only k2 has it, and only on policy.
    as_it_is = gradient_of_the_loss(kind, "estimate", before)
    assert torch.allclose(as_it_is, exact, rtol=1e-3) is (kind == "k2" and before is None)


def test_a_penalty_in_the_reward_is_not_in_the_loss_too() -> None:
    config = config_of(reference_policy_kl_penalty=0.3, use_kl_in_reward=True)
    logprobs = LOGITS.log_softmax(0).view(1, 4).requires_grad_()
    inputs = inputs_of(
        logprobs,
        torch.ones(1, 4, dtype=torch.bool),
        advantages=torch.zeros(1, dtype=torch.float64),
        prev_logprobs=logprobs.detach(),
        generation_logprobs=logprobs.detach(),
        reference_logprobs=REFERENCE.view(1, 4),
    )
    output = PolicyGradientLoss(config, prev_is_current=True)(inputs)
    assert output.loss.item() == 0.0
    assert not gradient_of(output.loss, logprobs).any()
    assert "kl_penalty" not in output.metrics


def test_the_clamp_bounds_the_weighed_estimate_too() -> None:
    config = config_of(reference_policy_kl_gradient="divergence", kl_output_clamp_value=2.0)
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    prev, reference = torch.tensor([[-5.0, -1.0], [-2.0, -2.0]], dtype=torch.float64)
    value = reference_divergence(logprobs, prev, reference, config)  # e^4 x 0.37, and 1 x 0.37
    assert value.tolist() == pytest.approx([2.0, math.exp(-1)])
    assert gradient_of(value.sum(), logprobs)[0] == 0.0


def test_in_the_reward_k1_has_the_gradient_of_the_divergence_of_responses() -> None:
    """All responses of two tokens of a policy whose second token depends on the first."""
    generator = torch.Generator().manual_seed(0)
    first, second, *of_reference = (torch.randn(size, 3, generator=generator).double() for size in (1, 3, 1, 3))
    for logits in (first, second):
        logits.requires_grad_()
    policy = torch.stack([first.log_softmax(1)[0].repeat_interleave(3), second.log_softmax(1).flatten()], dim=1)
    reference = torch.stack(
        [of_reference[0].log_softmax(1)[0].repeat_interleave(3), of_reference[1].log_softmax(1).flatten()], dim=1
    )
    exact = torch.autograd.grad(divergence(policy.sum(1), reference.sum(1)), (first, second), retain_graph=True)

    def by_reward(kind: str) -> list[Tensor]:
        config = config_of(reference_policy_kl_type=kind, kl_output_clamp_value=None)
        cost = divergence_of_responses(policy.detach(), reference, torch.ones(9, 2, dtype=torch.bool), config)
        expected = (policy.sum(1).exp().detach() * cost * policy.sum(1)).sum()
        return list(torch.autograd.grad(expected, (first, second), retain_graph=True))

    torch.testing.assert_close(by_reward("k1"), list(exact), rtol=1e-12, atol=1e-15)
    assert not torch.allclose(by_reward("k3")[0], exact[0], rtol=0.1), "which is why it is refused"


def test_divergence_of_responses_by_hand() -> None:
    nan, mask = math.nan, torch.tensor([[False, True, True], [False, True, False]])
    logprobs = torch.tensor([[nan, -1.0, -2.0], [nan, -1.0, nan]])
    reference = torch.tensor([[nan, -1.5, -30.0], [nan, -0.5, nan]])
    config = config_of(reference_policy_kl_type="k1", kl_output_clamp_value=10.0)
    assert divergence_of_responses(logprobs, reference, mask, config).tolist() == [10.5, -0.5]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Divergences from a teacher against sums over a whole vocabulary in float64, and bandits whose gradient is known."""

from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from nemo_rl_moe.algorithms.losses.ratios import importance_ratio
from nemo_rl_moe.algorithms.losses.teacher_divergence import (
    LOWEST_TEACHER_LOGPROB,
    KlType,
    candidate_divergence,
    sampled_divergence,
)

VOCABULARY, POSITIONS, WEIGHT = 11, 5, 0.3
KINDS: tuple[KlType, ...] = get_args(KlType)


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)


def whole(policy: Tensor, teacher: Tensor, kind: KlType) -> Tensor:
    """The divergence of two distributions by torch's own function."""
    p, q = Categorical(probs=policy), Categorical(probs=teacher)
    forward, reverse = kl_divergence(q, p), kl_divergence(p, q)
    if kind == "jensen_shannon":
        mean = Categorical(probs=(policy + teacher) / 2)
        return (kl_divergence(p, mean) + kl_divergence(q, mean)) / 2
    return {"forward": forward, "reverse": reverse, "mixed": WEIGHT * forward + (1 - WEIGHT) * reverse}[kind]


def grouped(probabilities: Tensor, ids: Tensor) -> Tensor:
    """Probabilities of the candidates, and of all others together."""
    chosen = probabilities.gather(-1, ids)
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4, VOCABULARY - 1])
def test_value_and_gradient_are_those_of_candidates_and_their_tail(kind: KlType, k: int) -> None:
    policy, teacher = logits(1).requires_grad_(), logits(2)
    ids = policy.topk(k).indices
    ours = candidate_divergence(
        policy.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids), kind, WEIGHT
    )
    wanted = whole(grouped(policy.softmax(-1), ids), grouped(teacher.softmax(-1), ids), kind)
    torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=1e-10)
    (ours_gradient,) = torch.autograd.grad(ours.sum(), policy)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), policy)
    torch.testing.assert_close(ours_gradient, wanted_gradient, atol=1e-10, rtol=1e-9)
    # Grouping outcomes loses what differs within a group, and never adds.
    assert (ours <= whole(policy.softmax(-1), teacher.softmax(-1), kind) + 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_all_tokens_it_is_the_divergence_of_the_whole_vocabulary(kind: KlType, dtype: torch.dtype) -> None:
    policy, teacher = logits(1, dtype).requires_grad_(), logits(2, dtype)
    ours = candidate_divergence(policy.log_softmax(-1), teacher.log_softmax(-1), kind, WEIGHT)
    exact = policy.detach().double().requires_grad_()
    wanted = whole(exact.softmax(-1), teacher.double().softmax(-1), kind)
    torch.testing.assert_close(ours.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), policy)[0].double(),
        torch.autograd.grad(wanted.sum(), exact)[0],
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_no_divergence_and_no_gradient(kind: KlType) -> None:
    policy = logits(1, torch.float32).requires_grad_()
    logprobs = policy.log_softmax(-1)[:, :4]
    found = candidate_divergence(logprobs, logprobs, kind)
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert found.abs().max() < 1e-6
    assert gradient.abs().max() < 1e-6


def test_one_candidate_counts_with_its_tail_where_renormalised_it_would_be_nothing() -> None:
    """O2."""
    policy, teacher = logits(1).requires_grad_(), logits(2)
    ids = policy.argmax(-1, keepdim=True)
    ours, theirs = (each.log_softmax(-1).gather(-1, ids) for each in (policy, teacher))
    assert (candidate_divergence(ours, theirs, "reverse") > 1e-3).all()
    renormalised = whole((ours - ours).exp(), (theirs - theirs).exp(), "reverse")
    assert renormalised.abs().max() == 0


def test_a_token_that_the_teacher_rules_out_gives_a_finite_divergence() -> None:
    policy = torch.zeros(1, 2, requires_grad=True)
    teacher = torch.tensor([[0.0, torch.finfo(torch.float32).min]])
    for kind in KINDS:
        found = candidate_divergence(policy.log_softmax(-1), teacher, kind)
        (gradient,) = torch.autograd.grad(found.sum(), policy)
        assert found.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient[0, 0] < 0 < gradient[0, 1]
    found = candidate_divergence(policy.log_softmax(-1), teacher, "reverse")
    assert found.item() == pytest.approx(-LOWEST_TEACHER_LOGPROB / 2, rel=0.05)


def test_nothing_goes_back_to_the_teacher_or_to_who_sampled() -> None:
    """O3."""
    policy, teacher, sampler = (logits(seed).requires_grad_() for seed in (1, 2, 3))
    for kind in KINDS:
        candidate_divergence(policy.log_softmax(-1)[:, :3], teacher.log_softmax(-1)[:, :3], kind).sum().backward()
    own, theirs, drawn = (each.log_softmax(-1)[:, 0] for each in (policy, teacher, sampler))
    loss, unbiased = sampled_divergence(own, theirs, importance_ratio(own, drawn))
    loss.sum().backward()
    assert policy.grad is not None
    assert policy.grad.abs().sum() > 0
    assert teacher.grad is None
    assert sampler.grad is None
    assert not unbiased.requires_grad


def expected_over_tokens(values: Tensor, probabilities: Tensor) -> Tensor:
    """Mean over the token that is sampled, of values of every token."""
    return (probabilities * values).sum()


@pytest.mark.parametrize("sampled_by_another", [False, True])
def test_the_estimate_from_a_sampled_token_has_the_divergence_and_its_gradient_in_expectation(
    sampled_by_another: bool,
) -> None:
    policy, teacher, other = logits(1)[0].requires_grad_(), logits(2)[0], logits(3)[0]
    sampler = (other if sampled_by_another else policy.detach()).log_softmax(-1)
    own = policy.log_softmax(-1)
    loss, unbiased = sampled_divergence(own, teacher.log_softmax(-1), importance_ratio(own, sampler))
    exact = whole(policy.softmax(-1), teacher.softmax(-1), "reverse")
    torch.testing.assert_close(expected_over_tokens(unbiased, sampler.exp()), exact.detach())
    (ours,) = torch.autograd.grad(expected_over_tokens(loss, sampler.exp()), policy, retain_graph=True)
    (wanted,) = torch.autograd.grad(exact, policy)
    torch.testing.assert_close(ours, wanted)


def test_in_the_advantage_the_divergence_of_a_position_would_teach_nothing() -> None:
    """O1: in the advantage its expected gradient is 0; as a term of the loss it has one."""
    policy, teacher = logits(1)[0].requires_grad_(), logits(2)[0]
    log_p = policy.log_softmax(-1)
    ids = log_p.topk(4).indices
    at_position = candidate_divergence(log_p[ids], teacher.log_softmax(-1)[ids], "reverse")
    as_advantage = expected_over_tokens(-at_position.detach() * log_p, log_p.detach().exp())
    (nothing,) = torch.autograd.grad(as_advantage, policy, retain_graph=True)
    assert nothing.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(at_position, policy)
    assert gradient.abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_steps_along_the_gradient_bring_the_policy_to_the_teacher(kind: KlType) -> None:
    policy, teacher = logits(1).requires_grad_(), logits(2)
    optimizer = torch.optim.Adam([policy], lr=0.1)
    for _ in range(400):
        optimizer.zero_grad()
        log_p = policy.log_softmax(-1)
        ids = log_p.topk(4).indices  # the policy's own: others enter as it learns of them through the tail
        candidate_divergence(log_p.gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids), kind).mean().backward()
        optimizer.step()
    before = whole(logits(1).softmax(-1), teacher.softmax(-1), "forward").mean()
    after = whole(policy.detach().softmax(-1), teacher.softmax(-1), "forward").mean()
    assert after < 0.1 * before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_policy_that_is_sure_of_its_candidates_learns_what_the_teacher_sees_beside_them(dtype: torch.dtype) -> None:
    """Of a mass of 2.6e-7 beside the candidates the value ends at 1e-6; the gradient has the same direction still."""
    policy = torch.tensor([[16.0, 15.0, 0.0, 0.5, 0.2]], dtype=dtype).requires_grad_()
    teacher = torch.tensor([[1.0, 0.5, 2.5, 2.0, 1.5]], dtype=dtype).log_softmax(-1)
    own = policy.log_softmax(-1)
    assert 2e-7 < float(own[0, 2:].detach().exp().sum()) < 6e-7
    found = candidate_divergence(own[:, :2], teacher[:, :2], "forward")
    (gradient,) = torch.autograd.grad(found.sum(), policy)

    def with_whole_tail(logprobs: Tensor) -> Tensor:
        return torch.cat([logprobs[:, :2], logprobs[:, 2:].logsumexp(-1, keepdim=True)], -1)

    exact_policy = policy.detach().double().requires_grad_()
    ours, theirs = with_whole_tail(exact_policy.log_softmax(-1)), with_whole_tail(teacher.double())
    (exact,) = torch.autograd.grad((theirs.exp() * (theirs - ours)).sum(), exact_policy)
    assert float(torch.cosine_similarity(gradient.double(), exact).item()) > 0.9
    assert 0.1 < float(gradient.norm() / exact.norm()) < 1.5

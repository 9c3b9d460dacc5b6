# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Divergences of the policy from a teacher, computed on candidate tokens, or estimated from the sampled token.

Both models give the log-probabilities of `k` candidates at a position. All other tokens together, the *tail*, are one
more outcome with the remaining probability. So both distributions have `k + 1` outcomes that add up to 1. Their
divergence is a lower bound of the divergence over the full vocabulary, and is exact if all tokens are candidates. If
candidates were renormalised instead, distributions with one candidate would always agree, and the probability of other
tokens would never count.

The divergence at a position is a function of the previous tokens. So it is a term of the loss, and is differentiated.
In the advantage of the token that is sampled at the position, it would be a baseline, whose expected gradient is 0.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import kl_estimate

KlType = Literal["forward", "reverse", "mixed", "jensen_shannon"]

LOWEST_TAIL = 1e-6
"""Smallest probability of the tail, all tokens that are not candidates. Below it, `1 - sum` in float32 is rounding."""
LOWEST_TEACHER_LOGPROB = -80.0
"""Lower bound of a teacher's log-probabilities. It keeps the divergence finite for tokens that a teacher rules out."""


def with_tail(logprobs: Float[Tensor, "*tokens k"]) -> Float[Tensor, "*tokens outcomes"]:
    """Append the log-probability of the tail to the candidates' log-probabilities. The tail is all other tokens.

    The probability of the tail is at least `LOWEST_TAIL`. If the true probability is lower, the gradient is smaller,
    but not 0: a policy that is sure of its candidates must still learn that the teacher is not sure.
    """
    mass = -torch.expm1(logprobs.logsumexp(-1, keepdim=True))
    held = mass + (mass.clamp(min=LOWEST_TAIL) - mass).detach()
    return torch.cat([logprobs, held.log()], -1)


def candidate_divergence(
    logprobs: Float[Tensor, "*tokens k"],
    teacher_logprobs: Float[Tensor, "*tokens k"],
    kind: KlType,
    mixed_kl_weight: float = 0.5,
) -> Float[Tensor, "*tokens"]:
    """Return the divergence at each position, in nats and never below 0.

    Its outcomes are the candidates, which must be distinct, and the tail: all other tokens as one.

    - `forward`: `KL(teacher || policy)`
    - `reverse`: `KL(policy || teacher)`
    - `mixed`: weighted mean of both, with the weight `mixed_kl_weight` on `forward`
    - `jensen_shannon`: mean of the divergences of both models from their mean distribution

    Args:
        logprobs: Log-probabilities of the policy. Only they have a gradient.
        teacher_logprobs: Log-probabilities of the teacher, for the same candidates.
    """
    policy = with_tail(logprobs)
    teacher = with_tail(teacher_logprobs.detach()).clamp(min=LOWEST_TEACHER_LOGPROB)
    if kind == "jensen_shannon":
        mean = torch.logaddexp(policy, teacher) - math.log(2)
        return (_divergence(policy, mean) + _divergence(teacher, mean)) / 2
    forward_weight = {"forward": 1.0, "reverse": 0.0, "mixed": mixed_kl_weight}[kind]
    total = torch.zeros_like(policy[..., 0])
    if forward_weight > 0:
        total = total + forward_weight * _divergence(teacher, policy)
    if forward_weight < 1:
        total = total + (1 - forward_weight) * _divergence(policy, teacher)
    return total


def _divergence(
    logprobs: Float[Tensor, "*tokens outcomes"], others: Float[Tensor, "*tokens outcomes"]
) -> Float[Tensor, "*tokens"]:
    return (logprobs.exp() * (logprobs - others)).sum(-1)


def sampled_divergence(
    logprobs: Float[Tensor, "*tokens"],
    teacher_logprobs: Float[Tensor, "*tokens"],
    weights: Float[Tensor, "*tokens"],
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Return two estimates of `KL(policy || teacher)` from one sampled token at each position, in nats.

    Args:
        logprobs: Log-probabilities of the policy. Only they have a gradient.
        weights: Weights of both results: the policy's probability over the sampling probability, bounded or not.

    Returns:
        First, half the square of the difference of log-probabilities. Its expected gradient is the divergence's (see
        `divergence.py`). Second, the difference without gradient. Its expectation is the divergence.
    """
    teacher = teacher_logprobs.detach().clamp(min=LOWEST_TEACHER_LOGPROB)
    unbiased = weights * kl_estimate(logprobs.detach(), teacher, "k1")
    return weights * kl_estimate(logprobs, teacher, "k2"), unbiased

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Divergences of the policy from a teacher, exact on candidate tokens, or estimated from the sampled one.

Both models give the log-probabilities of `k` candidates at a position. All other tokens together, the tail, are one
more outcome, which has the remaining mass. So both distributions have `k + 1` outcomes that add up to 1, and their
divergence is a lower bound of the divergence over the full vocabulary, exact if all tokens are candidates. Renormalised
on the candidates instead, distributions with one candidate would always agree, and mass on other tokens would never
count.

The divergence at a position is a function of the previous tokens, so its gradient is that of a term of the loss. In the
advantage of the token sampled there it would be a baseline, whose expected gradient is 0.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import kl_estimate

KlType = Literal["forward", "reverse", "mixed", "jensen_shannon"]

LOWEST_TAIL = 1e-6
"""Smallest mass of a tail. Below, `1 - sum` in float32 is rounding, and so is the gradient of its logarithm."""
LOWEST_TEACHER_LOGPROB = -80.0
"""Lower bound of a teacher's log-probabilities, which keeps the divergence finite for tokens that it rules out."""


def with_tail(logprobs: Float[Tensor, "*tokens k"]) -> Float[Tensor, "*tokens outcomes"]:
    """Append the log-probability of all tokens that are not candidates.

    Its value is bounded by `LOWEST_TAIL`. Below, its gradient only shrinks: a policy that is sure of its candidates
    must still learn that the teacher is not.
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
    """Compute the divergence of each position in nats, never below 0, on distinct candidates and their tail.

    - `forward`: `KL(teacher || policy)`
    - `reverse`: `KL(policy || teacher)`
    - `mixed`: their mean, with the weight `mixed_kl_weight` on `forward`
    - `jensen_shannon`: mean of the divergences of both from their mean distribution

    Args:
        logprobs: Of the policy. Only these have a gradient.
        teacher_logprobs: Of the same candidates.
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
    """Estimate `KL(policy || teacher)` from one sampled token at each position, in nats.

    Args:
        logprobs: Of the policy. Only these have a gradient.
        weights: Policy's probability over the sampling probability, bounded or not, for both results.

    Returns:
        Half the square of the difference of log-probabilities, whose expected gradient is the divergence's (see
        `divergence.py`), and the difference without gradient, whose expectation is the divergence.
    """
    teacher = teacher_logprobs.detach().clamp(min=LOWEST_TEACHER_LOGPROB)
    unbiased = weights * kl_estimate(logprobs.detach(), teacher, "k1")
    return weights * kl_estimate(logprobs, teacher, "k2"), unbiased

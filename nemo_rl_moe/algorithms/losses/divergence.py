# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of the policy's divergence from a reference model, from sampled tokens, for the loss or the reward.

The policy has sampled a token `x`, and `d = log reference - log policy` of this token. Estimates of
`KL(policy || reference)` are `k1 = -d` and `k3 = exp(d) - 1 - d`, which are unbiased, and `k2 = d^2 / 2` (J. Schulman,
"Approximating KL Divergence", 2020).

An estimate depends on the policy's weights through its value, and through which tokens are sampled:

    gradient of E[k] = E[gradient of k] + E[k * gradient of log policy]

A loss that differentiates only `k` lacks the second part, of the score function (Tang and Munos, arXiv:2506.09477):

- For `k1` the first part is 0, so that as a loss it teaches nothing. The second part alone is the divergence's
  gradient.
- For `k3` the first part is the gradient of the other divergence, `KL(reference || policy)`. The sum of both parts is
  the divergence's gradient.
- For `k2` the first part alone is the divergence's gradient, although the value is biased.

All of this holds for the distribution of one token given the previous ones. Only a penalty in the reward of the
complete response accounts for earlier tokens that lead to larger divergence later.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.rl.objectives.interface import LARGEST_LOG_RATIO


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `exp(log_ratio)`, but at most `exp(LARGEST_LOG_RATIO)`. Beyond this bound the gradient is 0.

    One token that a policy has nearly ruled out would make a float32 mean infinite, or its gradient `inf * 0`. No
    training survives a ratio of half a billion. Clips and truncations act far below.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def kl_estimate(
    logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
    kind: Literal["k1", "k2", "k3"],
) -> Float[Tensor, "*shape"]:
    """Return the estimate of `KL(policy || reference)` per token, in nats, from tokens that the policy sampled.

    In `k3 = exp(d) - 1 - d`, `d = log reference - log policy` is at most `LARGEST_LOG_RATIO`. Beyond this bound the
    gradient is 0, and so never infinite or of the wrong sign.
    """
    log_ratio = reference_logprobs - logprobs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    # If the two are close, exp(d) - 1 would lose most of the digits that remain after - d.
    return torch.expm1(log_ratio) - log_ratio


def js_divergence_estimate(
    logprobs: Float[Tensor, "*shape"], other_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return an estimate of the Jensen-Shannon divergence of two distributions for each token, in nats, never below 0.

    With the mixture `m = (p + q) / 2`, it is half of `p/m - 1 - log(p/m)` plus half of the same for `q`. NeMo-RL logs
    this as `js_divergence_error`. As `p + q` is `2m`, it is `log cosh(d / 2)` with `d = log p - log q`, here bounded by
    `LARGEST_LOG_RATIO`. For close distributions it is `d^2 / 8`. A sum of logarithms would lose all digits of such a
    number.
    """
    half = (logprobs - other_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) / 2
    return torch.log1p(2 * torch.sinh(half / 2).square())


def clamped_estimate(estimate: Float[Tensor, "*shape"], config: PolicyGradientLossConfig) -> Float[Tensor, "*shape"]:
    """Return the estimate with its magnitude bounded by `kl_output_clamp_value`. Beyond this bound the gradient is 0.

    `k3` grows like `exp(d)`. A token whose probability in the reference is e^10 times that in the policy counts 22,015
    nats, and would dominate the update.
    """
    largest = config.kl_output_clamp_value
    return estimate if largest is None else estimate.clamp(-largest, largest)


def reference_divergence(
    logprobs: Float[Tensor, "*shape"],
    prev_logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
    config: PolicyGradientLossConfig,
) -> Float[Tensor, "*shape"]:
    """Return each token's part of the penalty in the loss, before any averaging.

    With `reference_policy_kl_gradient: divergence`, the expected gradient equals the gradient of
    `KL(policy || reference)`. The expectation is over tokens that the policy before the step samples. To achieve this,
    the estimate is weighted by the ratio of the policy's probability to its probability before the step. This ratio is
    1 if both policies are the same, and its gradient adds the score function. `k2` has the right gradient without the
    score function, so its weight is detached.

    Args:
        logprobs: Log-probabilities of the trained policy.
        prev_logprobs: Log-probabilities of the policy before the step, which sampled the tokens, without gradient.
        reference_logprobs: Log-probabilities of the reference model, without gradient.
    """
    estimate = kl_estimate(logprobs, reference_logprobs, config.reference_policy_kl_type)
    if config.reference_policy_kl_gradient == "divergence":
        ratio = bounded_exp(logprobs - prev_logprobs)
        estimate = estimate * (ratio.detach() if config.reference_policy_kl_type == "k2" else ratio)
    return clamped_estimate(estimate, config)


def divergence_of_responses(
    logprobs: Float[Tensor, "responses tokens"],
    reference_logprobs: Float[Tensor, "responses tokens"],
    mask: Bool[Tensor, "responses tokens"],
    config: PolicyGradientLossConfig,
) -> Float[Tensor, " responses"]:
    """Return the estimate of the divergence of complete responses, in nats: the sum over their tokens, float64.

    If it is subtracted from the reward, the expected gradient is that of the divergence between distributions of
    responses. This holds only for `k1` (verl's `use_kl_in_reward`), see the beginning of this module.

    Args:
        logprobs: Log-probabilities of the policy before the step.
        mask: True for tokens that the policy sampled. Values at other tokens may be anything.
    """
    estimate = kl_estimate(logprobs.double(), reference_logprobs.double(), config.reference_policy_kl_type)
    return clamped_estimate(estimate, config).where(mask, 0.0).sum(dim=1)

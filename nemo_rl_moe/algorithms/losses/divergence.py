# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Divergence of the policy from a reference model: its estimates from sampled tokens, in the loss or the reward.

With `d = log reference - log policy` of a token `x` that the policy sampled, estimates of `KL(policy || reference)` are
(J. Schulman, "Approximating KL Divergence", 2020) `k1 = -d` and `k3 = exp(d) - 1 - d`, unbiased, and `k2 = d^2 / 2`.

An estimate depends on the policy's weights through its value and through the tokens at which it is taken:

    gradient of E[k] = E[gradient of k] + E[k * gradient of log policy]

A loss that differentiates only `k` lacks the second part, the score function's (Tang and Munos, arXiv:2506.09477):

- For `k1` the first part is 0: as a loss it teaches nothing, and the second part alone is the divergence's gradient.
- For `k3` the first part is the gradient of the other divergence, `KL(reference || policy)`. The sum of both parts is
  the divergence's gradient.
- For `k2`, whose value is biased, the first part alone is the divergence's gradient.

All of this holds for the distribution of one token given the previous ones. Only the reward, which belongs to the
complete response, accounts for earlier tokens that lead to larger divergence later.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig

LARGEST_LOG_RATIO = 20.0
"""Largest exponent of `bounded_exp`: e^20 is half a billion, and float32 overflows at e^88."""


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute `exp`, but at most `exp(LARGEST_LOG_RATIO)`, beyond which its gradient is 0.

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

    In `k3`, `d` is at most `LARGEST_LOG_RATIO` in both terms. Beyond, its gradient is 0, never infinite and never of
    the wrong sign.
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
    """Estimate the Jensen-Shannon divergence of two distributions for each token, in nats, never below 0.

    With the mixture `m = (p + q) / 2` it is half of `p/m - 1 - log(p/m)` plus half of the same for `q`, which NeMo-RL
    logs as `js_divergence_error`. As `p + q` is `2m`, this is `log cosh(d / 2)` with `d = log p - log q`, here bounded
    by `LARGEST_LOG_RATIO`. For close distributions it is `d^2 / 8`, of which a sum of logarithms would lose all digits.
    """
    half = (logprobs - other_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) / 2
    return torch.log1p(2 * torch.sinh(half / 2).square())


def clamped_estimate(estimate: Float[Tensor, "*shape"], config: PolicyGradientLossConfig) -> Float[Tensor, "*shape"]:
    """Bound the magnitude of an estimate by `kl_output_clamp_value`, beyond which its gradient is 0.

    `k3` grows like `exp(d)`: one token with e^10 times the policy's probability in the reference counts 22,015 nats,
    and would dominate the update.
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

    With `reference_policy_kl_gradient: divergence` its expected gradient over tokens of the policy before the step is
    that of `KL(policy || reference)`. For this the estimate is weighted by the policy's probability over the one before
    the step, a ratio whose gradient is the score function's and whose value is 1 if both are the same. `k2` has the
    right gradient without that part, so its weight is a constant.

    Args:
        logprobs: Of the trained policy.
        prev_logprobs: Of the policy before the step, which sampled the tokens, without gradient.
        reference_logprobs: Of the reference model, without gradient.
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

    Subtracted from the reward, it gives in expectation the gradient of the divergence of the distributions of
    responses, but only for `k1` (verl's `use_kl_in_reward`), see above.

    Args:
        logprobs: Of the policy before the step.
        mask: Tokens that the policy sampled. Others may hold anything.
    """
    estimate = kl_estimate(logprobs.double(), reference_logprobs.double(), config.reference_policy_kl_type)
    return clamped_estimate(estimate, config).where(mask, 0.0).sum(dim=1)

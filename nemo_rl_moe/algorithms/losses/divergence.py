# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The divergence of the policy from a reference model: its estimates from sampled tokens, in the loss or the reward.

With `d = log reference - log policy` of a token `x` that the policy sampled, estimates of `KL(policy || reference)` are
(J. Schulman, "Approximating KL Divergence", 2020) `k1 = -d` and `k3 = exp(d) - 1 - d`, unbiased, and `k2 = d^2 / 2`.

An estimate depends on the policy's weights twice: through its value, and through the tokens that it is taken at.

    gradient of E[k] = E[gradient of k] + E[k * gradient of log policy]

A loss that differentiates `k` alone lacks the second part, the score function's (Tang and Munos, arXiv:2506.09477):

- of `k1` the first part is 0: as a loss it teaches nothing, and the second one alone is the divergence's gradient;
- of `k3` the first part is the gradient of the other divergence, `KL(reference || policy)`; both are the divergence's;
- of `k2`, whose value is biased, the first part alone is the divergence's gradient.

All of it holds for the distribution of one token, given those before it: that earlier tokens lead to where later ones
diverge more, only the reward knows, which a whole response gets.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig

LARGEST_LOG_RATIO = 20.0
"""Largest exponent of `bounded_exp`: e^20 is half a billion, and float32 ends at e^88."""


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute `exp`, but no larger than `exp(LARGEST_LOG_RATIO)`, beyond which its gradient is 0.

    One token that a policy has all but ruled out would make a float32 mean infinite, or its gradient `inf * 0`. No
    training goes on through a ratio of half a billion; clips and truncations act far below.
    """
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def kl_estimate(
    logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
    kind: Literal["k1", "k2", "k3"],
) -> Float[Tensor, "*shape"]:
    """Return the token by token estimate of `KL(policy || reference)`, in nats, from tokens that the policy sampled.

    In `k3`, `d` ends at `LARGEST_LOG_RATIO`, in both of its terms: beyond, its gradient is 0, never infinite and never
    of the wrong sign.
    """
    log_ratio = reference_logprobs - logprobs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    # Where the two are close, exp(d) - 1 would lose most of the digits that are left after - d.
    return torch.expm1(log_ratio) - log_ratio


def js_divergence_estimate(
    logprobs: Float[Tensor, "*shape"], other_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Estimate the Jensen-Shannon divergence of two distributions for each token, in nats; from 0 up.

    With the mixture `m = (p + q) / 2`, half of `p/m - 1 - log(p/m)` and half of the same of `q`, what NeMo-RL logs as
    `js_divergence_error`. As `p + q` is `2m`, that is `log cosh(d / 2)` with `d = log p - log q`, here of a `d` that
    ends at `LARGEST_LOG_RATIO`. Where the two are close it is `d^2 / 8`, of which a sum of logarithms would keep no
    digit.
    """
    half = (logprobs - other_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) / 2
    return torch.log1p(2 * torch.sinh(half / 2).square())


def clamped_estimate(estimate: Float[Tensor, "*shape"], config: PolicyGradientLossConfig) -> Float[Tensor, "*shape"]:
    """Bound an estimate by `kl_output_clamp_value` in size, beyond which its gradient is 0.

    `k3` grows as `exp(d)`: one token that the reference gives e^10 times the policy's probability counts 22,015 nats,
    and would be the whole of the update.
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
    that of `KL(policy || reference)`: the estimate is weighed by the policy's probability over the one before the step,
    which is 1 with the score function's gradient where the two are the same. `k2` has the right gradient without that
    part, so that its weight is a constant.

    Args:
        logprobs: Of the policy that is trained.
        prev_logprobs: Of the policy before the step, whose tokens these are; no gradient.
        reference_logprobs: Of the reference model; no gradient.
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
    """Return the estimate of the divergence of whole responses, in nats: the sum over their tokens; float64.

    What a reward loses of it, times the gradient of the response's log-probability, is in expectation the gradient of
    the divergence of the distributions of responses, for `k1` alone (verl's `use_kl_in_reward`): see above.

    Args:
        logprobs: Of the policy before the step.
        mask: Tokens that the policy sampled; the others may hold anything.
    """
    estimate = kl_estimate(logprobs.double(), reference_logprobs.double(), config.reference_policy_kl_type)
    return clamped_estimate(estimate, config).where(mask, 0.0).sum(dim=1)

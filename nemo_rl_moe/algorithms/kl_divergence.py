# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of the divergence between two policies from the tokens that one of them drew."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.probability_ratio import LARGEST_LOG_RATIO


def kl_estimate(
    logprobs: Float[Tensor, "*shape"],
    reference_logprobs: Float[Tensor, "*shape"],
    kind: Literal["k1", "k2", "k3"],
) -> Float[Tensor, "*shape"]:
    """Token by token estimate of `KL(policy || reference)`, in nats, from tokens that the policy drew.

    With `d = log reference - log policy` (J. Schulman, "Approximating KL Divergence", 2020):

    - `k1 = -d`: unbiased, of either sign. As a loss it teaches nothing: its expected gradient is 0.
    - `k2 = d^2 / 2`: biased, never negative. Its expected gradient is that of `KL(policy || reference)`.
    - `k3 = exp(d) - 1 - d`: unbiased, never negative. Its expected gradient is that of `KL(reference || policy)`.

    On the gradients: Tang and Munos, arXiv:2506.09477. In `k3`, `d` ends at `LARGEST_LOG_RATIO`, in both of its terms:
    beyond, its gradient is 0, never infinite and never of the wrong sign.
    """
    log_ratio = reference_logprobs - logprobs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    # Where the two are close, exp(d) - 1 would lose most of the digits that are left after - d.
    return torch.expm1(log_ratio) - log_ratio

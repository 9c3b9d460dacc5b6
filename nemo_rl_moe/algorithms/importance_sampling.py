# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights for what training and generation disagree about: the engines that do the two are never quite the same."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.probability_ratio import bounded_exp
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig


def importance_ratio(
    prev_logprobs: Float[Tensor, "*shape"], generation_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """How much more likely training makes each token than generation did, before the step; no gradient."""
    return bounded_exp((prev_logprobs - generation_logprobs).detach())


def importance_weights(ratio: Float[Tensor, "*shape"], config: PolicyGradientLossConfig) -> Float[Tensor, "*shape"]:
    """What each token's part of the loss is multiplied by, always token by token.

    - `none`: 1.
    - `truncated`: the ratio, at most the upper bound (truncated importance sampling; F. Yao et al., "Your Efficient RL
      Framework Secretly Brings You Off-Policy RL Training", 2025).
    - `icepop`: the ratio between the bounds, themselves included, and 0 outside: there the token is left out (X. Zhao
      et al., "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop", 2025).

    Args:
        ratio: Of `importance_ratio`.
        config: The correction and its bounds.
    """
    if config.importance_sampling_correction == "none":
        return torch.ones_like(ratio)
    if config.importance_sampling_correction == "truncated":
        return ratio.clamp(max=config.importance_sampling_ratio_max)
    return ratio.where(~out_of_bounds(ratio, config), 0.0)


def out_of_bounds(ratio: Float[Tensor, "*shape"], config: PolicyGradientLossConfig) -> Bool[Tensor, "*shape"]:
    """Where the correction does not take the ratio as it is; of the bounds, `truncated` has the upper one only."""
    too_large = ratio > config.importance_sampling_ratio_max
    if config.importance_sampling_correction == "truncated":
        return too_large
    return too_large | (ratio < config.importance_sampling_ratio_min)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a policy-gradient loss: change of the policy, mismatch of generation and training, and correction."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import bounded_exp, js_divergence_estimate, kl_estimate
from nemo_rl_moe.algorithms.losses.ratios import importance_ratio
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs
from nemo_rl_moe.rl.corrections import CORRECTIONS, out_of_bounds
from nemo_rl_moe.rl.objectives.interface import Clipping

Metrics = dict[str, tuple[Tensor, Reduction]]
Quantity = TypeVar("Quantity")


def ratio_metrics(
    ratio: Float[Tensor, "sequences targets"],
    clipping: Clipping,
    config: PolicyGradientLossConfig,
    inputs: LossInputs,
) -> Metrics:
    """Return metrics of the probability ratio. It shows how the policy has changed since the beginning of the step.

    - `probs_ratio`: its mean, and `probs_ratio_{min,max}`
    - `probs_ratio_clamped`: mean of the ratio clamped to `1 - ratio_clip_min` and `1 + ratio_clip_max`, for any
      advantage
    - `clip_fraction_low`, `clip_fraction_high`: share of the tokens that the objective stops at its lower or upper
      bound. For the clipped surrogate these depend on the advantage's sign, and the upper bound may be that of dual
      clip.

    Args:
        ratio: Ratio in the objective, detached.
        clipping: Tokens that the objective stops.
    """
    mask = inputs.token_mask
    return {
        "probs_ratio": _token_mean(ratio, inputs),
        "probs_ratio_clamped": _token_mean(ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max), inputs),
        "probs_ratio_min": (ratio.where(mask, inf).amin(), Reduction.MIN),
        "probs_ratio_max": (ratio.where(mask, -inf).amax(), Reduction.MAX),
        "clip_fraction_low": _token_mean(clipping.low, inputs),
        "clip_fraction_high": _token_mean(clipping.high, inputs),
    }


def mismatch_metrics(
    current: Float[Tensor, "sequences targets"],
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    inputs: LossInputs,
) -> Metrics:
    """Return metrics of the mismatch of generation and training, and the policy's entropy.

    None of these metrics depends on the importance-sampling correction:

    - `token_mult_prob_error`: mean of `exp(|log training - log generation|)`, ideally 1
    - `gen_kl_error`: k3 estimate of `KL(generation || training)` in nats, ideally 0
    - `policy_kl_error`: k3 estimate of `KL(training || generation)`, from the same tokens
    - `js_divergence_error`: mean of `js_divergence_estimate`
    - `sampling_importance_ratio`: mean of training over generation probability, per token, before any correction, and
      `sampling_importance_ratio_{min,max}`
    - `sampling_logp_difference`: mean of `|log training - log generation|`, and `sampling_logp_difference_max`
    - `approx_entropy`: entropy of the current policy in nats, estimated from the sampled tokens with importance
      weights: mean of `-(policy / generation) * log policy`

    Args:
        current: Log-probabilities of the trained policy, detached.
        prev: Log-probabilities of the policy before the step.
    """
    mask, difference = inputs.token_mask, (prev - generation).abs()
    ratio = importance_ratio(prev, generation)
    return {
        "approx_entropy": _token_mean(-bounded_exp(current - generation) * current, inputs),
        "token_mult_prob_error": _token_mean(bounded_exp(difference), inputs),
        "gen_kl_error": _token_mean(kl_estimate(generation, prev, "k3"), inputs),
        "policy_kl_error": _token_mean(kl_estimate(prev, generation, "k3"), inputs),
        "js_divergence_error": _token_mean(js_divergence_estimate(prev, generation), inputs),
        "sampling_importance_ratio": _token_mean(ratio, inputs),
        "sampling_importance_ratio_min": (ratio.where(mask, inf).amin(), Reduction.MIN),
        "sampling_importance_ratio_max": (ratio.where(mask, -inf).amax(), Reduction.MAX),
        "sampling_logp_difference": _token_mean(difference, inputs),
        "sampling_logp_difference_max": (difference.where(mask, 0.0).amax(), Reduction.MAX),
    }


def correction_metrics(
    ratio: Float[Tensor, "sequences targets"],
    weights: Float[Tensor, "sequences targets"],
    config: PolicyGradientLossConfig,
    inputs: LossInputs,
) -> Metrics:
    """Return metrics of the importance-sampling correction. Empty without one.

    - `importance_weight`: mean weight of a token
    - `importance_weight_truncated_fraction` or, if the correction drops tokens, `importance_weight_dropped_fraction`:
      share of the tokens with an importance ratio (of the token or of its sequence) out of bounds
    """
    effect = CORRECTIONS[config.importance_sampling_correction].effect
    if effect is None:
        return {}
    return {
        "importance_weight": _token_mean(weights, inputs),
        f"importance_weight_{effect}_fraction": _token_mean(out_of_bounds(ratio, config), inputs),
    }


def class_sums(
    names: Sequence[str],
    of_class: Int[Tensor, "sequences targets"],
    of_tokens: Mapping[Quantity, Shaped[Tensor, "sequences targets"]],
    key: Callable[[str, Quantity], str],
) -> Metrics:
    """Return the sum of each quantity over the tokens of each class, in float64. Tokens of class -1 do not count."""
    values = torch.stack([each.detach().double() for each in of_tokens.values()])
    metrics: Metrics = {}
    for number, name in enumerate(names):
        sums = values.where(of_class == number, 0).sum((1, 2))
        for quantity, total in zip(of_tokens, sums, strict=True):
            metrics[key(name, quantity)] = total, Reduction.PART
    return metrics


def _token_mean(values: Tensor, inputs: LossInputs) -> tuple[Tensor, Reduction]:
    total = values.where(inputs.token_mask, 0).sum(dtype=inputs.logprobs.dtype)
    return total / max(inputs.global_valid_tokens, 1), Reduction.SHARE

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What is worth watching of a policy's update: how far it moves, and how far generation and training are apart.

All means are over the valid tokens of the global batch, whatever the loss averages over; each is returned as this
microbatch's share of it. None carries a gradient.
"""

from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.importance_sampling import out_of_bounds
from nemo_rl_moe.algorithms.kl_divergence import kl_estimate
from nemo_rl_moe.algorithms.probability_ratio import RatioBounds, bounded_exp
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.policy.interfaces import LossInputs

Metrics = dict[str, tuple[Tensor, Reduction]]


def ratio_metrics(
    ratio: Float[Tensor, "sequences targets"], bounds: RatioBounds, both: RatioBounds, inputs: LossInputs
) -> Metrics:
    """How far the policy has moved since the step began.

    - `probs_ratio`: its mean, and `probs_ratio_{min,max}`
    - `probs_ratio_clamped`: the mean of the ratio held between both bounds, whatever the advantage
    - `clip_fraction_low`, `clip_fraction_high`: share of the tokens whose ratio the objective replaces by its lower or
      its upper bound; for the clipped surrogate these depend on the advantage's sign, and the upper one may be that of
      dual clip

    Args:
        ratio: The ratio that the objective is made of, detached.
        bounds: What the objective holds it between.
        both: The bounds without regard to advantages.
        inputs: The microbatch.
    """
    mask = inputs.token_mask
    # A microbatch without valid tokens adds nothing to either extreme. Nor has a global batch without any moved.
    lowest, highest = (float("inf"), float("-inf")) if inputs.global_valid_tokens else (1.0, 1.0)
    return {
        "probs_ratio": _token_mean(ratio, inputs),
        "probs_ratio_clamped": _token_mean(both.clip(ratio), inputs),
        "probs_ratio_min": (ratio.where(mask, lowest).amin(), Reduction.MIN),
        "probs_ratio_max": (ratio.where(mask, highest).amax(), Reduction.MAX),
        "clip_fraction_low": _token_mean(ratio < bounds.lower, inputs),
        "clip_fraction_high": _token_mean(ratio > bounds.upper, inputs),
    }


def mismatch_metrics(
    current: Float[Tensor, "sequences targets"],
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    inputs: LossInputs,
) -> Metrics:
    """What generation and training make of the same tokens with the same weights, and the policy's entropy.

    - `token_mult_prob_error`: mean of `exp(|log training - log generation|)`; 1 is perfect
    - `gen_kl_error`: k3 estimate of `KL(generation || training)` in nats; 0 is perfect
    - `approx_entropy`: entropy of the policy in nats, estimated from the tokens that were drawn and weighted from
      generation to the policy as it is now: mean of `-(policy / generation) * log policy`

    Args:
        current: Log-probabilities of the policy that is trained, detached.
        prev: Of the policy before the step.
        generation: As the engine that drew the tokens computed them.
        inputs: The microbatch.
    """
    return {
        "approx_entropy": _token_mean(-bounded_exp(current - generation) * current, inputs),
        "token_mult_prob_error": _token_mean(bounded_exp((prev - generation).abs()), inputs),
        "gen_kl_error": _token_mean(kl_estimate(generation, prev, "k3"), inputs),
    }


def correction_metrics(
    ratio: Float[Tensor, "sequences targets"],
    weights: Float[Tensor, "sequences targets"],
    config: PolicyGradientLossConfig,
    inputs: LossInputs,
) -> Metrics:
    """What the importance-sampling correction does; nothing without one.

    - `importance_weight`: its mean
    - `importance_weight_truncated_fraction` or, of IcePop, `importance_weight_dropped_fraction`: share of the tokens
      whose ratio was out of bounds
    """
    if config.importance_sampling_correction == "none":
        return {}
    deed = "truncated" if config.importance_sampling_correction == "truncated" else "dropped"
    return {
        "importance_weight": _token_mean(weights, inputs),
        f"importance_weight_{deed}_fraction": _token_mean(out_of_bounds(ratio, config), inputs),
    }


def _token_mean(values: Tensor, inputs: LossInputs) -> tuple[Tensor, Reduction]:
    total = values.where(inputs.token_mask, 0).sum(dtype=inputs.logprobs.dtype)
    return total / max(inputs.global_valid_tokens, 1), Reduction.SHARE

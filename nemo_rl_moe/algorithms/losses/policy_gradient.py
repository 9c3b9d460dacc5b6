# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy-gradient losses: GRPO, DAPO, GSPO and CISPO, with their ratios, corrections, KL penalty and metrics."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import (
    bounded_exp,
    js_divergence_estimate,
    kl_estimate,
    reference_divergence,
)
from nemo_rl_moe.algorithms.losses.own_objective import ObjectiveInputs, own_surrogate
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.config.user_code import is_own
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs


def sequence_mean(
    values: Float[Tensor, "sequences targets"], mask: Bool[Tensor, "sequences targets"]
) -> Float[Tensor, "sequences 1"]:
    """Each sequence's mean over its valid tokens; 0 where it has none."""
    return values.where(mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def probability_ratio(
    logprobs: Float[Tensor, "sequences targets"],
    prev_logprobs: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    *,
    of_sequences: bool,
) -> Float[Tensor, "sequences targets"]:
    """Ratio of each token's probability under the policy to that before this step.

    Args:
        logprobs: Of the policy that is trained; finite where masked.
        prev_logprobs: Of the policy before the step; finite where masked.
        mask: Valid tokens.
        of_sequences: Give all tokens of a sequence `y` the ratio `(pi(y) / pi_prev(y)) ** (1 / |y|)`, the exponential
            of its mean log-ratio (GSPO, arXiv:2507.18071, eq. 7), whose gradient reaches every token of it.
    """
    log_ratio = logprobs - prev_logprobs
    if of_sequences:
        log_ratio = sequence_mean(log_ratio, mask).expand_as(log_ratio)
    return bounded_exp(log_ratio)


@dataclass(frozen=True)
class RatioBounds:
    """Bounds of the probability ratio in the objective.

    Attributes:
        lower: Where a ratio is below, the objective takes this for it, and its gradient is 0.
        upper: The same above.
    """

    lower: Float[Tensor, "sequences targets"]
    upper: Float[Tensor, "sequences targets"]

    def clip(self, ratio: Float[Tensor, "sequences targets"]) -> Float[Tensor, "sequences targets"]:
        """The ratio, held between the bounds."""
        return ratio.clamp(self.lower, self.upper)


def both_bounds(like: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """`1 - ratio_clip_min` and `1 + ratio_clip_max` for every token, whatever its advantage."""
    return RatioBounds(
        like.new_full(like.shape, 1 - config.ratio_clip_min), like.new_full(like.shape, 1 + config.ratio_clip_max)
    )


def surrogate_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """The bounds that the clipped surrogate comes to, given the sign of the advantage.

    PPO's `min(ratio * A, clip(ratio) * A)` (arXiv:1707.06347, eq. 7) only ever clips a ratio that has moved the way the
    advantage points: from above where `A > 0`, from below where `A < 0`. Dual clip's `max(..., c * A)` for `A < 0`
    (arXiv:1912.09729) is an upper bound of `c`. Where `A = 0` nothing is clipped.
    """
    both = both_bounds(advantages, config)
    upper_if_negative = float("inf") if config.ratio_clip_c is None else config.ratio_clip_c
    return RatioBounds(
        lower=both.lower.where(advantages < 0, 0.0),
        upper=both.upper.where(advantages > 0, float("inf")).masked_fill(advantages < 0, upper_if_negative),
    )


def importance_ratio(
    prev_logprobs: Float[Tensor, "*shape"], generation_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Ratio of each token's probability in training to that in generation, before the step; no gradient."""
    return bounded_exp((prev_logprobs - generation_logprobs).detach())


def sequence_importance_ratio(
    prev_logprobs: Float[Tensor, "sequences targets"],
    generation_logprobs: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    *,
    geometric: bool,
) -> Float[Tensor, "sequences targets"]:
    """Ratio of each sequence's probability in training to that in generation, at all of its tokens; no gradient.

    Args:
        prev_logprobs: In training before the step; finite where masked.
        generation_logprobs: In generation; finite where masked.
        mask: Valid tokens.
        geometric: Give its `1 / |y|`-th power, the geometric mean of its tokens' ratios.
    """
    log_ratio = (prev_logprobs - generation_logprobs).detach().where(mask, 0.0)
    of_sequence = sequence_mean(log_ratio, mask) if geometric else log_ratio.sum(dim=1, keepdim=True)
    return bounded_exp(of_sequence).expand_as(log_ratio)


def importance_weights(
    ratio: Float[Tensor, "*shape"], bounded: Float[Tensor, "*shape"], config: PolicyGradientLossConfig
) -> Float[Tensor, "*shape"]:
    """Importance weight of each token's part of the loss.

    - `none`: 1.
    - `truncated`: the ratio, held between the bounds (truncated importance sampling; F. Yao et al., "Your Efficient RL
      Framework Secretly Brings You Off-Policy RL Training", 2025, whose lower bound is 0).
    - `icepop`: the ratio between the bounds, themselves included, and 0 outside: there the token is left out (X. Zhao
      et al., "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop", 2025).
    - `sequence_mask`: the ratio of the token, and 0 in sequences whose geometric mean is outside of the bounds (J. Liu,
      Y. Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", 2025).

    Args:
        ratio: What a token is weighed by: of `importance_ratio`, or of `sequence_importance_ratio`.
        bounded: What the bounds are compared with: the same, or the geometric mean of the sequence.
        config: The correction and its bounds.
    """
    if config.importance_sampling_correction == "none":
        return torch.ones_like(ratio)
    if config.importance_sampling_correction == "truncated":
        return ratio.clamp(config.importance_sampling_lower_bound, config.importance_sampling_ratio_max)
    return ratio.where(~out_of_bounds(bounded, config), 0.0)


def out_of_bounds(ratio: Float[Tensor, "*shape"], config: PolicyGradientLossConfig) -> Bool[Tensor, "*shape"]:
    """Tokens that the correction truncates or leaves out."""
    return (ratio > config.importance_sampling_ratio_max) | (ratio < config.importance_sampling_lower_bound)


def importance_ratios(
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    config: PolicyGradientLossConfig,
) -> tuple[Float[Tensor, "sequences targets"], Float[Tensor, "sequences targets"]]:
    """Ratios of the configured correction: what tokens are weighed by, and what the bounds are compared with."""
    if config.importance_sampling_level == "sequence":
        ratio = sequence_importance_ratio(prev, generation, mask, geometric=False)
        return ratio, ratio
    ratio = importance_ratio(prev, generation)
    if config.importance_sampling_correction == "sequence_mask":
        return ratio, sequence_importance_ratio(prev, generation, mask, geometric=True)
    return ratio, ratio


Metrics = dict[str, tuple[Tensor, Reduction]]


def ratio_metrics(
    ratio: Float[Tensor, "sequences targets"], bounds: RatioBounds, both: RatioBounds, inputs: LossInputs
) -> Metrics:
    """Metrics of the probability ratio: the policy's move since the step began.

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
    lowest, highest = _extremes_of_nothing(inputs)
    return {
        "probs_ratio": _token_mean(ratio, inputs),
        "probs_ratio_clamped": _token_mean(both.clip(ratio), inputs),
        "probs_ratio_min": (ratio.where(mask, lowest).amin(), Reduction.MIN),
        "probs_ratio_max": (ratio.where(mask, highest).amax(), Reduction.MAX),
        "clip_fraction_low": _token_mean(ratio < bounds.lower, inputs),
        "clip_fraction_high": _token_mean(ratio > bounds.upper, inputs),
    }


def _extremes_of_nothing(inputs: LossInputs) -> tuple[float, float]:
    """Lowest and highest ratio of a masked token: one that adds nothing to either extreme over microbatches and ranks.

    A global batch without any valid token has not moved: 1.
    """
    return (float("inf"), float("-inf")) if inputs.global_valid_tokens else (1.0, 1.0)


def mismatch_metrics(
    current: Float[Tensor, "sequences targets"],
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    inputs: LossInputs,
) -> Metrics:
    """Metrics of the mismatch between generation and training with the same weights, and the policy's entropy.

    With a correction or without:

    - `token_mult_prob_error`: mean of `exp(|log training - log generation|)`; 1 is perfect
    - `gen_kl_error`: k3 estimate of `KL(generation || training)` in nats; 0 is perfect
    - `policy_kl_error`: the same of `KL(training || generation)`, from the same tokens
    - `js_divergence_error`: mean of `js_divergence_estimate`
    - `sampling_importance_ratio`: mean of training over generation probability, of each token, before any correction;
      `sampling_importance_ratio_{min,max}`
    - `sampling_logp_difference`: mean of `|log training - log generation|`; `sampling_logp_difference_max`
    - `approx_entropy`: entropy of the policy in nats, estimated from the tokens that were drawn and weighted from
      generation to the policy as it is now: mean of `-(policy / generation) * log policy`

    Args:
        current: Log-probabilities of the policy that is trained, detached.
        prev: Of the policy before the step.
        generation: As the engine that drew the tokens computed them.
        inputs: The microbatch.
    """
    mask, difference = inputs.token_mask, (prev - generation).abs()
    ratio = importance_ratio(prev, generation)
    lowest, highest = _extremes_of_nothing(inputs)
    return {
        "approx_entropy": _token_mean(-bounded_exp(current - generation) * current, inputs),
        "token_mult_prob_error": _token_mean(bounded_exp(difference), inputs),
        "gen_kl_error": _token_mean(kl_estimate(generation, prev, "k3"), inputs),
        "policy_kl_error": _token_mean(kl_estimate(prev, generation, "k3"), inputs),
        "js_divergence_error": _token_mean(js_divergence_estimate(prev, generation), inputs),
        "sampling_importance_ratio": _token_mean(ratio, inputs),
        "sampling_importance_ratio_min": (ratio.where(mask, lowest).amin(), Reduction.MIN),
        "sampling_importance_ratio_max": (ratio.where(mask, highest).amax(), Reduction.MAX),
        "sampling_logp_difference": _token_mean(difference, inputs),
        "sampling_logp_difference_max": (difference.where(mask, 0.0).amax(), Reduction.MAX),
    }


def correction_metrics(
    ratio: Float[Tensor, "sequences targets"],
    weights: Float[Tensor, "sequences targets"],
    config: PolicyGradientLossConfig,
    inputs: LossInputs,
) -> Metrics:
    """Metrics of the importance-sampling correction; none without one.

    - `importance_weight`: its mean
    - `importance_weight_truncated_fraction` or, where they are left out, `importance_weight_dropped_fraction`: share of
      the tokens whose ratio, or whose sequence's, was out of bounds
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


@dataclass(frozen=True)
class PolicyGradientLoss:
    """The clipped surrogate of PPO and its variants, with a penalty on the divergence from a reference model.

    Every term is a mean over the global batch: over its valid tokens, or (`token_level_loss: false`) over its sequences
    of each one's mean over its valid tokens. With a `length_normalizer` each one's sum over its tokens is divided by
    that number instead, so that a token of a long response counts as much as one of a short one (Dr. GRPO,
    arXiv:2503.20783). A global batch without any valid token has loss 0.

        loss = (
            mean(weight * surrogate)
            + reference_policy_kl_penalty * mean(weight * KL)
            - entropy_bonus * mean(entropy)
        )

    The weight is the importance-sampling correction. It is on the divergence too, because that is an expectation over
    the training policy's tokens as well, while generation drew them; and a token that the correction leaves out is left
    out of both. The divisors stay as they are: the tokens left out count in them. The entropy is that of the policy's
    whole distribution at each valid token, so that it needs no weight.

    Columns of the batch, which may hold anything where masked, NaN and infinities too:

    - `advantages`, of each sequence or of each token; the others have rows and columns as `logprobs`
    - `generation_logprobs`: of the policy as the engine that drew the tokens computed them
    - `prev_logprobs`: of the policy before the step as training computes them; not read with `on_policy`
    - `reference_logprobs`: of the reference model; only with a penalty above 0 that is not in the reward

    Metrics: those of `policy_loss_metrics`; `kl_penalty`, the mean that the loss adds, before
    `reference_policy_kl_penalty`, where it adds one; `entropy`, the mean that the bonus is of, where there is one, in
    nats; and `num_valid_tokens`.

    Attributes:
        config: The section `loss_fn`.
        on_policy: The policy is the one before the step: the ratio is 1, and its gradient that of the log-probability.
    """

    config: PolicyGradientLossConfig
    on_policy: bool

    @property
    def needs(self) -> frozenset[Head]:
        """The exact entropy, where there is a bonus on it."""
        return frozenset({Head.ENTROPY} if self.config.entropy_bonus > 0 else ())

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """One microbatch's share of the loss.

        Raises:
            KeyError: One of the columns is missing.
        """
        config, mask = self.config, inputs.token_mask
        logprobs = _valid(inputs.logprobs, mask)
        current = logprobs.detach()
        prev = current if self.on_policy else _column(inputs, "prev_logprobs")
        generation = _column(inputs, "generation_logprobs")
        advantages = _column(inputs, "advantages")

        ratio = probability_ratio(logprobs, prev, mask, of_sequences=config.sequence_level_importance_ratios)
        bounds = ratio_bounds(advantages, config)
        mismatch, bounded = importance_ratios(prev, generation, mask, config)
        weights = importance_weights(mismatch, bounded, config)

        if is_own(config.objective):
            surrogate = own_surrogate(ObjectiveInputs(logprobs, ratio, advantages, mask, config))
        else:
            surrogate = policy_surrogate(logprobs, ratio, bounds, advantages, config)
        loss = _global_mean(weights * surrogate, inputs, config)
        metrics: dict[str, tuple[Tensor, Reduction]] = {"num_valid_tokens": (mask.sum(), Reduction.SUM)}
        if config.reference_policy_kl_penalty > 0 and not config.use_kl_in_reward:
            divergence = reference_divergence(logprobs, prev, _column(inputs, "reference_logprobs"), config)
            penalty = _global_mean(weights * divergence, inputs, config)
            loss = loss + config.reference_policy_kl_penalty * penalty
            metrics["kl_penalty"] = (penalty.detach(), Reduction.SHARE)

        if config.entropy_bonus > 0:
            assert inputs.entropy is not None  # a head that the loss needs
            entropy = _global_mean(_valid(inputs.entropy, mask), inputs, config)
            loss = loss - config.entropy_bonus * entropy
            metrics["entropy"] = (entropy.detach(), Reduction.SHARE)

        metrics |= ratio_metrics(ratio.detach(), bounds, both_bounds(advantages, config), inputs)
        metrics |= mismatch_metrics(current, prev, generation, inputs)
        metrics |= correction_metrics(bounded, weights, config, inputs)
        return LossOutputs(loss=loss, metrics=metrics)


def ratio_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """Bounds of each token's ratio in the objective; none of one of the user's own, which is not known."""
    if config.objective == "reinforce" or is_own(config.objective):
        return RatioBounds(torch.zeros_like(advantages), torch.full_like(advantages, float("inf")))
    return both_bounds(advantages, config) if config.objective == "cispo" else surrogate_bounds(advantages, config)


def policy_surrogate(
    logprobs: Float[Tensor, "sequences targets"],
    ratio: Float[Tensor, "sequences targets"],
    bounds: RatioBounds,
    advantages: Float[Tensor, "sequences targets"],
    config: PolicyGradientLossConfig,
) -> Float[Tensor, "sequences targets"]:
    """Each token's loss, before any averaging.

    - `clipped`: `-clip(ratio) * A`; a clipped token has no gradient (PPO, arXiv:1707.06347, eq. 7).
    - `cispo`: `-clip(ratio) * A * logprob`, with the clipped ratio a constant, so that every token keeps its gradient
      (MiniMax-M1, arXiv:2506.13585). It has no dual clip.
    - `reinforce`: `-A * logprob`, without a ratio (REINFORCE, Williams 1992). Where a step is one update, its gradient
      is that of the others.
    """
    if config.objective == "reinforce":
        return -advantages * logprobs
    clipped = bounds.clip(ratio)
    if config.objective == "cispo":
        return -clipped.detach() * advantages * logprobs
    return -clipped * advantages


def _valid(
    values: Float[Tensor, "sequences targets"], mask: Bool[Tensor, "sequences targets"]
) -> Float[Tensor, "sequences targets"]:
    """0 where masked, in the gradient too; before any arithmetic, as NaN and infinity times 0 are NaN."""
    return values.where(mask, 0.0)


def _column(inputs: LossInputs, name: str) -> Float[Tensor, "sequences targets"]:
    return _valid(inputs.per_target(name).detach().to(inputs.logprobs.dtype), inputs.token_mask)


def _global_mean(
    values: Float[Tensor, "sequences targets"], inputs: LossInputs, config: PolicyGradientLossConfig
) -> Float[Tensor, ""]:
    """This microbatch's share of the mean over the global batch, as the loss averages."""
    if config.token_level_loss:
        return values.where(inputs.token_mask, 0.0).sum() / max(inputs.global_valid_tokens, 1)
    if config.length_normalizer is not None:
        total = values.where(inputs.token_mask, 0.0).sum()
        return total / (config.length_normalizer * max(inputs.global_sequences, 1))
    return sequence_mean(values, inputs.token_mask).sum() / max(inputs.global_sequences, 1)

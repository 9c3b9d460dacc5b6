# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of GRPO and its relatives: a pure function from one microbatch to its share of the global batch's loss."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.importance_sampling import importance_ratio, importance_weights
from nemo_rl_moe.algorithms.kl_divergence import kl_estimate
from nemo_rl_moe.algorithms.policy_loss_metrics import correction_metrics, mismatch_metrics, ratio_metrics
from nemo_rl_moe.algorithms.probability_ratio import (
    RatioBounds,
    both_bounds,
    probability_ratio,
    sequence_mean,
    surrogate_bounds,
)
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.policy.interfaces import LossInputs, LossOutputs


@dataclass(frozen=True)
class PolicyGradientLoss:
    """The clipped surrogate of PPO and its variants, with a penalty on the divergence from a reference model.

    Every term is a mean over the global batch: over its valid tokens, or (`token_level_loss: false`) over its sequences
    of each one's mean over its valid tokens. A global batch without any valid token has loss 0.

        loss = mean(weight * surrogate) + reference_policy_kl_penalty * mean(weight * KL)

    The weight is the importance-sampling correction. It is on the divergence too, because that is an expectation over
    the training policy's tokens as well, while generation drew them; and a token that IcePop leaves out is left out of
    all of the loss. The divisors stay as they are: the tokens left out count in them.

    Reads from the inputs' `extras`, where what is masked may hold anything, NaN and infinities too:

    - `advantages`, `[sequences]`; the others have rows and columns as `logprobs`
    - `generation_logprobs`: of the policy as the engine that drew the tokens computed them
    - `prev_logprobs`: of the policy before the step as training computes them; not read with `on_policy`
    - `reference_logprobs`: of the reference model; only with a penalty above 0

    Metrics: those of `policy_loss_metrics`; `kl_penalty`, the mean that the loss adds, before
    `reference_policy_kl_penalty`, when that is above 0; and `num_valid_tokens`.

    Attributes:
        config: The section `loss_fn`.
        on_policy: The policy is the one before the step: the ratio is 1, and its gradient that of the log-probability.
    """

    config: PolicyGradientLossConfig
    on_policy: bool

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """One microbatch's share of the loss.

        Raises:
            KeyError: One of `extras` is missing.
        """
        config, mask = self.config, inputs.token_mask
        logprobs = _valid(inputs.logprobs, mask)
        current = logprobs.detach()
        prev = current if self.on_policy else _extra(inputs, "prev_logprobs")
        generation = _extra(inputs, "generation_logprobs")
        advantages = _extra(inputs, "advantages", one_per_sequence=True)

        ratio = probability_ratio(logprobs, prev, mask, of_sequences=config.sequence_level_importance_ratios)
        bounds = ratio_bounds(advantages, config)
        mismatch = importance_ratio(prev, generation)
        weights = importance_weights(mismatch, config)

        loss = _global_mean(weights * policy_surrogate(logprobs, ratio, bounds, advantages, config), inputs, config)
        metrics: dict[str, tuple[Tensor, Reduction]] = {"num_valid_tokens": (mask.sum(), Reduction.SUM)}
        if config.reference_policy_kl_penalty > 0:
            divergence = kl_estimate(logprobs, _extra(inputs, "reference_logprobs"), config.reference_policy_kl_type)
            penalty = _global_mean(weights * divergence, inputs, config)
            loss = loss + config.reference_policy_kl_penalty * penalty
            metrics["kl_penalty"] = (penalty.detach(), Reduction.SHARE)

        metrics |= ratio_metrics(ratio.detach(), bounds, both_bounds(advantages, config), inputs)
        metrics |= mismatch_metrics(current, prev, generation, inputs)
        metrics |= correction_metrics(mismatch, weights, config, inputs)
        return LossOutputs(loss=loss, metrics=metrics)


def ratio_bounds(advantages: Float[Tensor, "sequences targets"], config: PolicyGradientLossConfig) -> RatioBounds:
    """What the objective holds the ratio of each token between."""
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
    """
    clipped = bounds.clip(ratio)
    if config.objective == "cispo":
        return -clipped.detach() * advantages * logprobs
    return -clipped * advantages


def _valid(
    values: Float[Tensor, "sequences targets"], mask: Bool[Tensor, "sequences targets"]
) -> Float[Tensor, "sequences targets"]:
    """0 where masked, in the gradient too; before any arithmetic, as NaN and infinity times 0 are NaN."""
    return values.where(mask, 0.0)


def _extra(inputs: LossInputs, name: str, *, one_per_sequence: bool = False) -> Float[Tensor, "sequences targets"]:
    values = inputs.extras[name].detach().to(inputs.logprobs.dtype)
    if one_per_sequence:
        values = values[:, None].expand_as(inputs.logprobs)
    return _valid(values, inputs.token_mask)


def _global_mean(
    values: Float[Tensor, "sequences targets"], inputs: LossInputs, config: PolicyGradientLossConfig
) -> Float[Tensor, ""]:
    """This microbatch's share of the mean over the global batch, as the loss averages."""
    if config.token_level_loss:
        return values.where(inputs.token_mask, 0.0).sum() / max(inputs.global_valid_tokens, 1)
    return sequence_mean(values, inputs.token_mask).sum() / max(inputs.global_sequences, 1)

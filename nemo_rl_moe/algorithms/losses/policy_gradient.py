# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy-gradient loss: importance weights, KL penalty and entropy bonus around an objective."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.custom_objective import find_objective
from nemo_rl_moe.algorithms.losses.divergence import reference_divergence
from nemo_rl_moe.algorithms.losses.lag_sums import lag_sums
from nemo_rl_moe.algorithms.losses.policy_metrics import Metrics, correction_metrics, mismatch_metrics, ratio_metrics
from nemo_rl_moe.algorithms.losses.position_sums import position_sums
from nemo_rl_moe.algorithms.losses.ratios import importance_ratios, probability_ratio
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs
from nemo_rl_moe.rl.aggregation import global_mean
from nemo_rl_moe.rl.corrections import CORRECTIONS, bounds_old_tokens
from nemo_rl_moe.rl.objectives import ObjectiveInputs

SELECTED_TOKENS = "selected_tokens"
"""Column of the tokens that an objective selects before the step's first update."""


@dataclass(frozen=True)
class PolicyGradientLoss:
    """Clipped surrogate of PPO and its variants, with a penalty on the divergence from a reference model.

    Every term is a mean over the global batch as `global_mean` computes it. A global batch without valid tokens has
    loss 0.

        loss = (
            mean(weight * surrogate)
            + reference_policy_kl_penalty * mean(weight * KL)
            - entropy_bonus * mean(entropy)
        )

    The weight is the importance-sampling correction. It also applies to the divergence: both terms are expectations
    over tokens of the training policy, but the generation engine sampled the tokens. Tokens that the correction drops
    are dropped from both terms, but still count in the divisors. The entropy is that of the policy's full distribution
    at each valid token. It needs no weight.

    Columns of the batch. Masked values may be anything, even NaN and infinity.

    - `advantages`: per sequence or per token. The other columns have the shape of `logprobs`.
    - `generation_logprobs`: log-probabilities of the policy, computed by the engine that sampled the tokens
    - `prev_logprobs`: log-probabilities of the policy before the step, computed by training. Not read with
      `prev_is_current`.
    - `reference_logprobs`: log-probabilities of the reference model, only with a penalty above 0 that is not in the
      reward
    - `selected_tokens`: whether the objective's `select` has chosen a token, only with such an objective

    Metrics are in `policy_metrics.py`, `position_sums` and, for a batch with the column `token_lag`, `lag_sums`.
    Further metrics are `num_valid_tokens`, `kl_penalty` (the mean KL in the loss, before its coefficient), and with an
    entropy bonus `entropy` (the mean entropy, in nats).

    Attributes:
        config: The section `loss_fn`.
        prev_is_current: Whether the training pass also gives the log-probabilities before the step, since the step is
            one update. Then the ratio is 1, and its gradient is that of the log-probability.
        ratio_to_generation: Whether the ratio is relative to the engine's log-probabilities instead of `prev_logprobs`,
            because older weights sampled the tokens.
    """

    config: PolicyGradientLossConfig
    prev_is_current: bool
    ratio_to_generation: bool = False

    @property
    def needs(self) -> frozenset[Head]:
        return frozenset({Head.ENTROPY} if self.config.entropy_bonus > 0 else ())

    @property
    def reduction(self) -> Reduction:
        return Reduction.SHARE if self.config.token_level_loss else Reduction.SEQUENCE_SHARE

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        config, mask = self.config, inputs.token_mask
        logprobs = _valid(inputs.logprobs, mask)
        current = logprobs.detach()
        prev = current if self.prev_is_current else _column(inputs, "prev_logprobs")
        generation = _column(inputs, "generation_logprobs")
        advantages = _column(inputs, "advantages")

        objective = find_objective(config.objective)
        to_generation = self.ratio_to_generation or objective.ratio_to_generation
        old = generation if to_generation else prev
        ratio = probability_ratio(logprobs, old, mask, of_sequences=config.sequence_level_importance_ratios)
        mismatch, bounded = importance_ratios(prev, generation, mask, config)
        weights = CORRECTIONS[config.importance_sampling_correction].weights(mismatch, bounded, config)
        tokens = ObjectiveInputs(
            logprobs=logprobs,
            prev_logprobs=prev,
            generation_logprobs=generation,
            reference_logprobs=_column(inputs, "reference_logprobs")
            if "reference_logprobs" in inputs.columns
            else None,
            ratio=ratio,
            log_ratio=logprobs - old,
            weights=weights,
            advantages=advantages,
            mask=mask,
            global_valid_tokens=inputs.global_valid_tokens,
            global_sequences=inputs.global_sequences,
            config=config,
            selected=None if objective.select is None else _column(inputs, SELECTED_TOKENS) > 0,
        )
        loss = _mean(weights * objective.function(tokens), tokens)
        metrics: Metrics = {"num_valid_tokens": (mask.sum(), Reduction.SUM)}
        if config.reference_policy_kl_penalty > 0 and not config.use_kl_in_reward:
            reference = _column(inputs, "reference_logprobs")
            penalty = _mean(weights * reference_divergence(logprobs, prev, reference, config), tokens)
            loss = loss + config.reference_policy_kl_penalty * penalty
            metrics["kl_penalty"] = (penalty.detach(), self.reduction)

        if config.entropy_bonus > 0:
            assert inputs.entropy is not None  # see `needs`
            entropy = _mean(_valid(inputs.entropy, mask), tokens)
            loss = loss - config.entropy_bonus * entropy
            metrics["entropy"] = (entropy.detach(), self.reduction)

        clipping = objective.clipping(tokens)
        metrics |= ratio_metrics(ratio.detach(), clipping, config, inputs)
        metrics |= mismatch_metrics(current, prev, generation, inputs)
        metrics |= correction_metrics(bounded, weights, config, inputs)
        is_bounded = (to_generation and objective.bounds_weight) or bounds_old_tokens(config)
        metrics |= lag_sums(prev, generation, clipping.any, inputs, is_bounded=is_bounded)
        metrics |= position_sums(prev, generation, mask)
        return LossOutputs(loss=loss, metrics=metrics)


def _valid(
    values: Float[Tensor, "sequences targets"], mask: Bool[Tensor, "sequences targets"]
) -> Float[Tensor, "sequences targets"]:
    """Return values with 0 where masked, also in the gradient. Multiplication by 0 would not remove NaN."""
    return values.where(mask, 0.0)


def _column(inputs: LossInputs, name: str) -> Float[Tensor, "sequences targets"]:
    return _valid(inputs.per_target(name).detach().to(inputs.logprobs.dtype), inputs.token_mask)


def _mean(values: Float[Tensor, "sequences targets"], tokens: ObjectiveInputs) -> Float[Tensor, ""]:
    return global_mean(values, tokens.mask, tokens.global_valid_tokens, tokens.global_sequences, tokens.config)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Probability ratios of a policy-gradient loss: new over old policy, and training over generation."""

from jaxtyping import Bool, Float
from torch import Tensor

from nemo_rl_moe.algorithms.losses.divergence import bounded_exp
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.rl.aggregation import sequence_mean
from nemo_rl_moe.rl.corrections import CORRECTIONS


def probability_ratio(
    logprobs: Float[Tensor, "sequences targets"],
    prev_logprobs: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    *,
    of_sequences: bool,
) -> Float[Tensor, "sequences targets"]:
    """Return the ratio of each token's probability under the trained policy to its probability before the step.

    Args:
        logprobs: Log-probabilities of the trained policy. Masked ones must be finite.
        prev_logprobs: Log-probabilities of the policy before the step. Masked ones must be finite.
        of_sequences: Whether all tokens of a sequence `y` get the ratio `(pi(y) / pi_prev(y)) ** (1 / |y|)`, the
            exponential of the mean log-ratio (GSPO, arXiv:2507.18071, eq. 7). Its gradient reaches every token of the
            sequence.
    """
    log_ratio = logprobs - prev_logprobs
    if of_sequences:
        log_ratio = sequence_mean(log_ratio, mask).expand_as(log_ratio)
    return bounded_exp(log_ratio)


def importance_ratio(
    prev_logprobs: Float[Tensor, "*shape"], generation_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the ratio of each token's probability in training to its probability in generation, without gradient."""
    return bounded_exp((prev_logprobs - generation_logprobs).detach())


def sequence_importance_ratio(
    prev_logprobs: Float[Tensor, "sequences targets"],
    generation_logprobs: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    *,
    geometric: bool,
) -> Float[Tensor, "sequences targets"]:
    """Return the ratio of each sequence's probability in training to its probability in generation, without gradient.

    Args:
        prev_logprobs: Log-probabilities in training before the step. Masked ones must be finite.
        generation_logprobs: Log-probabilities in generation. Masked ones must be finite.
        geometric: Whether to return the ratio's `1 / |y|`-th power, the geometric mean of the tokens' ratios.

    Returns:
        The sequence's ratio at each of its tokens.
    """
    log_ratio = (prev_logprobs - generation_logprobs).detach().where(mask, 0.0)
    of_sequence = sequence_mean(log_ratio, mask) if geometric else log_ratio.sum(dim=1, keepdim=True)
    return bounded_exp(of_sequence).expand_as(log_ratio)


def importance_ratios(
    prev: Float[Tensor, "sequences targets"],
    generation: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    config: PolicyGradientLossConfig,
) -> tuple[Float[Tensor, "sequences targets"], Float[Tensor, "sequences targets"]]:
    """Return two ratios for the configured correction: a token's weight, and the ratio that the bounds apply to."""
    if config.importance_sampling_level == "sequence":
        ratio = sequence_importance_ratio(prev, generation, mask, geometric=False)
        return ratio, ratio
    ratio = importance_ratio(prev, generation)
    if CORRECTIONS[config.importance_sampling_correction].bounds_geometric_mean:
        return ratio, sequence_importance_ratio(prev, generation, mask, geometric=True)
    return ratio, ratio

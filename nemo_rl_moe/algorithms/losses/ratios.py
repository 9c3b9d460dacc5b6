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
    """Compute the ratio of each token's probability under the trained policy to that before the step.

    Args:
        logprobs: Of the trained policy, finite where masked.
        prev_logprobs: Of the policy before the step, finite where masked.
        of_sequences: Give all tokens of a sequence `y` the ratio `(pi(y) / pi_prev(y)) ** (1 / |y|)`, the exponential
            of its mean log-ratio (GSPO, arXiv:2507.18071, eq. 7), whose gradient reaches every token of it.
    """
    log_ratio = logprobs - prev_logprobs
    if of_sequences:
        log_ratio = sequence_mean(log_ratio, mask).expand_as(log_ratio)
    return bounded_exp(log_ratio)


def importance_ratio(
    prev_logprobs: Float[Tensor, "*shape"], generation_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Compute the ratio of each token's probability in training to that in generation, without gradient."""
    return bounded_exp((prev_logprobs - generation_logprobs).detach())


def sequence_importance_ratio(
    prev_logprobs: Float[Tensor, "sequences targets"],
    generation_logprobs: Float[Tensor, "sequences targets"],
    mask: Bool[Tensor, "sequences targets"],
    *,
    geometric: bool,
) -> Float[Tensor, "sequences targets"]:
    """Compute the ratio of each sequence's probability in training to that in generation, without gradient.

    Args:
        prev_logprobs: In training before the step, finite where masked.
        generation_logprobs: In generation, finite where masked.
        geometric: Return its `1 / |y|`-th power, the geometric mean of its tokens' ratios.

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
    """Compute two ratios for the configured correction: the weight of a token, and the ratio to compare with bounds."""
    if config.importance_sampling_level == "sequence":
        ratio = sequence_importance_ratio(prev, generation, mask, geometric=False)
        return ratio, ratio
    ratio = importance_ratio(prev, generation)
    if CORRECTIONS[config.importance_sampling_correction].bounds_geometric_mean:
        return ratio, sequence_importance_ratio(prev, generation, mask, geometric=True)
    return ratio, ratio

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Shape rewards before an estimator of advantages, and bound the advantages after it."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import RewardShapingConfig
from nemo_rl_moe.rl.estimators.comparison import informative_groups
from nemo_rl_moe.rl.estimators.interface import Estimator, EstimatorInputs


def shape_rewards(
    rewards: Float[Tensor, "*responses"],
    response_lengths: Int[Tensor, "*responses"],
    max_new_tokens: int,
    config: RewardShapingConfig,
) -> Float[Tensor, "*responses"]:
    """Take a soft punishment of long responses from their rewards (DAPO, arXiv:2503.14476, eq. 13).

    A response may have `max_new_tokens - overlong_buffer_length` tokens for nothing. Each one more costs
    `overlong_buffer_penalty / overlong_buffer_length`, up to the whole penalty at `max_new_tokens`.

    Args:
        response_lengths: Generated tokens of each, its end token included.
        config: The punishment; not enabled, the rewards are returned as they are.

    Returns:
        New rewards, of the same type.
    """
    if not config.enabled:
        return rewards
    tokens_for_nothing = max_new_tokens - config.overlong_buffer_length
    share_of_buffer = (response_lengths.to(rewards.dtype) - tokens_for_nothing) / config.overlong_buffer_length
    return rewards - config.overlong_buffer_penalty * share_of_buffer.clamp(0.0, 1.0)


def compute_advantages(
    estimator: Estimator, inputs: EstimatorInputs
) -> Float[Tensor, "groups generations"] | Float[Tensor, "groups generations tokens"]:
    """Compute advantages, of the rewards' type; 0 for responses that take no part.

    Raises:
        ValueError: A response can be compared with nothing.
    """
    advantages = estimator.function(inputs).to(inputs.rewards.dtype)
    return advantages.where(for_each(inputs.takes_part, advantages), 0.0)


def for_each(of_responses: Bool[Tensor, "groups generations"], advantages: Tensor) -> Bool[Tensor, "groups ..."]:
    """Return a value of each response in a shape that broadcasts over its advantages."""
    return of_responses if advantages.ndim == of_responses.ndim else of_responses[:, :, None]


def clip_advantages(
    advantages: Float[Tensor, "groups ..."], low: float | None, high: float | None
) -> Float[Tensor, "groups ..."]:
    """Hold advantages between two bounds, of which either may be None; NaN stays NaN."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def frac_zero_std_groups(rewards: Float[Tensor, "groups generations"]) -> float:
    """Return the share of the groups whose rewards are all equal, which teach nothing."""
    return float((~informative_groups(rewards)).double().mean())

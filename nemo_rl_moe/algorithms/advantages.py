# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Shaping of rewards before an estimator of advantages, and bounds of the advantages after it."""

from jaxtyping import Float, Int
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
    """Subtract a soft penalty from the rewards of long responses (DAPO, arXiv:2503.14476, eq. 13).

    Each token beyond `max_new_tokens - overlong_buffer_length` costs `overlong_buffer_penalty /
    overlong_buffer_length`, up to the full penalty at `max_new_tokens`.

    Args:
        response_lengths: Number of generated tokens of each response, including its end token.

    Returns:
        New rewards of the same dtype, unchanged if the penalty is not enabled.
    """
    if not config.enabled:
        return rewards
    free_tokens = max_new_tokens - config.overlong_buffer_length
    share_of_buffer = (response_lengths.to(rewards.dtype) - free_tokens) / config.overlong_buffer_length
    return rewards - config.overlong_buffer_penalty * share_of_buffer.clamp(0.0, 1.0)


def compute_advantages(
    estimator: Estimator, inputs: EstimatorInputs
) -> Float[Tensor, "groups generations"] | Float[Tensor, "groups generations tokens"]:
    """Return advantages in the rewards' dtype. They are 0 for responses that are not compared and trained on.

    Raises:
        ValueError: The estimator has no other response to compare a response with.
    """
    advantages = estimator.function(inputs).to(inputs.rewards.dtype)
    takes_part = inputs.takes_part if advantages.ndim == inputs.takes_part.ndim else inputs.takes_part[:, :, None]
    return advantages.where(takes_part, 0.0)


def clip_advantages(
    advantages: Float[Tensor, "groups ..."], low: float | None, high: float | None
) -> Float[Tensor, "groups ..."]:
    """Return advantages clamped to the bounds. A bound may be None. NaN stays NaN."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def frac_zero_std_groups(rewards: Float[Tensor, "groups generations"]) -> float:
    """Return the share of groups whose rewards are all equal. Such groups teach nothing."""
    return float((~informative_groups(rewards)).double().mean())

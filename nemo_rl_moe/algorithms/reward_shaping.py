# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What is taken from rewards, or added to them, before they become advantages."""

from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.config.schema_grpo import RewardShapingConfig


def shape_rewards(
    rewards: Float[Tensor, "*responses"],
    response_lengths: Int[Tensor, "*responses"],
    max_new_tokens: int,
    config: RewardShapingConfig,
) -> Float[Tensor, "*responses"]:
    """Soft punishment of long responses (DAPO, arXiv:2503.14476, eq. 13).

    A response may have `max_new_tokens - overlong_buffer_length` tokens for nothing. Each one more costs
    `overlong_buffer_penalty / overlong_buffer_length`, up to the whole penalty at `max_new_tokens`.

    Args:
        rewards: One for each response.
        response_lengths: Generated tokens of each, its end token included.
        max_new_tokens: Most tokens that a response can have.
        config: The punishment; not enabled, the rewards are returned as they are.

    Returns:
        New rewards, of the same type.
    """
    if not config.enabled:
        return rewards
    tokens_for_nothing = max_new_tokens - config.overlong_buffer_length
    share_of_buffer = (response_lengths.to(rewards.dtype) - tokens_for_nothing) / config.overlong_buffer_length
    return rewards - config.overlong_buffer_penalty * share_of_buffer.clamp(0.0, 1.0)

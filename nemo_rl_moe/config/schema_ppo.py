# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections that PPO has beside those of GRPO, whose loop and loss it shares."""

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import NonNegativeInt, PositiveRatio, StrictModel, WholeOrLess
from nemo_rl_moe.config.schema_policy import TrainedRoleConfig


class PPOConfig(StrictModel):
    """Advantages by a critic (GAE), and when the policy begins to train."""

    gae_lambda: WholeOrLess
    """Decay of later differences in an advantage; 1: the return less the value, 0: one step of difference."""
    gae_lambda_value: WholeOrLess | None
    """`gae_lambda` in the returns that the critic learns, such as 1 for returns without its own values; null:
    `gae_lambda`."""
    gae_gamma: WholeOrLess
    """Discount of the reward for each trained token before it."""
    policy_training_start_step: NonNegativeInt
    """First steps in which the critic trains alone; 0: none."""


class ValueLossConfig(StrictModel):
    """The loss that the critic is trained with: half the mean squared error from the returns."""

    cliprange: PositiveRatio | None
    """Largest move of a value from the one before the step that still counts; null: any."""


class PPOMasterConfig(GRPOMasterConfig):
    """Everything that a run of proximal policy optimization needs: what GRPO has, and a critic."""

    ppo: PPOConfig
    """Advantages by the critic."""
    value: TrainedRoleConfig
    """The critic: a model with a value head; `cluster.roles.critic` places its workers."""
    value_loss_fn: ValueLossConfig
    """The critic's loss."""

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections of PPO, which shares loop and policy loss with GRPO."""

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import NonNegativeInt, PositiveRatio, StrictModel, WholeOrLess
from nemo_rl_moe.config.schema_policy import TrainedRoleConfig


class PPOConfig(StrictModel):
    """Advantages by a critic (GAE), and when the policy begins to train."""

    gae_lambda: WholeOrLess
    """Decay of later differences in an advantage. 1: the return minus the value. 0: the difference of one step."""
    gae_lambda_value: WholeOrLess | None
    """`gae_lambda` of the returns that the critic learns. 1: they do not use its own values. null: `gae_lambda`."""
    gae_gamma: WholeOrLess
    """Discount of the reward for each trained token that precedes it."""
    policy_training_start_step: NonNegativeInt
    """Number of first steps in which only the critic trains. 0: none."""


class ValueLossConfig(StrictModel):
    """The loss of the critic: half the mean squared error from the returns."""

    cliprange: PositiveRatio | None
    """Largest change of a value from its value before the step that still has a gradient. null: no limit."""


class PPOMasterConfig(GRPOMasterConfig):
    """The configuration of a PPO run: GRPO's sections, and a critic."""

    ppo: PPOConfig
    """Advantages by the critic."""
    value: TrainedRoleConfig
    """The critic: a model with a value head. `cluster.roles.critic` assigns its machines."""
    value_loss_fn: ValueLossConfig
    """The critic's loss."""

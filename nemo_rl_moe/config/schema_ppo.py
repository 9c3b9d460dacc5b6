# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections of PPO. The algorithm shares its loop and policy loss with GRPO."""

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_base import NonNegativeInt, PositiveRatio, StrictModel, WholeOrLess
from nemo_rl_moe.config.schema_policy import TrainedRoleConfig


class PPOConfig(StrictModel):
    """Advantages by a critic (GAE), and when the policy begins to train."""

    gae_lambda: WholeOrLess
    """Decay of later temporal differences in an advantage (GAE's lambda). 1: the advantage is the return minus the
    value. 0: the advantage is the temporal difference of one token."""
    gae_lambda_value: WholeOrLess | None
    """Lambda for the returns that the critic learns. 1: the returns do not use the critic's values. null: the same as
    `gae_lambda`."""
    gae_gamma: WholeOrLess
    """Discount of a reward for each trained token between the advantage's token and the reward. 1: no discount."""
    policy_training_start_step: NonNegativeInt
    """Number of steps at the start of the run in which only the critic trains. 0: none."""


class ValueLossConfig(StrictModel):
    """The loss of the critic: half the mean squared difference of its values from the returns."""

    cliprange: PositiveRatio | None
    """Maximum change of a token's value from its value before the step. A value that moved further towards the return
    has no gradient. null: no limit."""


class PPOMasterConfig(GRPOMasterConfig):
    """The configuration of a PPO run: GRPO's sections, and a critic."""

    ppo: PPOConfig
    """Advantages by the critic."""
    value: TrainedRoleConfig
    """The critic: a model with a value head. `cluster.roles.critic` assigns its machines."""
    value_loss_fn: ValueLossConfig
    """The critic's loss."""

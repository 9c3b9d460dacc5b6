# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `reward_model` of GRPO and of the algorithms that share its rollouts."""

from nemo_rl_moe.config.schema_environment import RewardWeight
from nemo_rl_moe.config.schema_policy import FrozenRoleConfig


class RewardModelConfig(FrozenRoleConfig):
    """A sequence classifier with one label that scores complete trajectories. Its `model_name` is a
    `ForSequenceClassification` model of transformers with the policy's tokenizer."""

    weight: RewardWeight
    """Weight of the score, which is added to the environment's reward. 0: the score is only logged."""

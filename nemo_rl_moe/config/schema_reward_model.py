# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `reward_model` of GRPO and of what shares its rollouts."""

from nemo_rl_moe.config.schema_environment import RewardWeight
from nemo_rl_moe.config.schema_policy import RoleModelConfig


class RewardModelConfig(RoleModelConfig):
    """A sequence classifier with one label that scores whole trajectories. Its `model_name` is that of a
    `ForSequenceClassification` of transformers with the policy's tokenizer."""

    weight: RewardWeight
    """Weight of its score, which is added to the environment's reward; 0: logged alone."""

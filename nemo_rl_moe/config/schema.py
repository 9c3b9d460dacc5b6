# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole configuration of each algorithm."""

from nemo_rl_moe.config.schema_base import StrictModel
from nemo_rl_moe.config.schema_dpo import DPOConfig
from nemo_rl_moe.config.schema_grpo import (
    EnvironmentConfig,
    GRPOConfig,
    GRPOLoggerConfig,
    GRPOPolicyConfig,
    PolicyGradientLossConfig,
    PromptDataConfig,
)
from nemo_rl_moe.config.schema_loop import SupervisedLoopConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.config.schema_run import CheckpointingConfig, ClusterConfig, DataConfig, LoggerConfig


class SFTConfig(SupervisedLoopConfig):
    """Supervised fine-tuning: how long, and when to validate."""


class MasterConfig(StrictModel):
    """The sections that every algorithm has."""

    checkpointing: CheckpointingConfig
    """What is kept."""
    policy: PolicyConfig
    """The model."""
    logger: LoggerConfig
    """Where metrics go."""
    cluster: ClusterConfig
    """The machines."""

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model, each of which works on its own part of a global batch."""
        return self.cluster.world_size // self.policy.megatron_cfg.model_parallel_size

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of what the batch sizes count."""
        return 1


class SFTMasterConfig(MasterConfig):
    """Everything that a run of supervised fine-tuning needs."""

    sft: SFTConfig
    """The loop."""
    data: DataConfig
    """The samples."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step."""
        return 1


class DPOMasterConfig(MasterConfig):
    """Everything that a run of direct preference optimization needs. Its batch sizes count pairs."""

    dpo: DPOConfig
    """The loop and its loss."""
    data: DataConfig
    """The pairs."""

    @property
    def sequences_per_sample(self) -> int:
        """A pair's."""
        return 2

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step."""
        return 1


class GRPOMasterConfig(MasterConfig):
    """Everything that a run of group relative policy optimization needs."""

    grpo: GRPOConfig
    """The loop."""
    loss_fn: PolicyGradientLossConfig
    """The loss."""
    policy: GRPOPolicyConfig
    """The model, and how it generates."""
    env: EnvironmentConfig
    """What scores the responses."""
    data: PromptDataConfig
    """The prompts."""
    logger: GRPOLoggerConfig
    """Where metrics and samples go."""

    @property
    def responses_per_step(self) -> int:
        """Responses that one step trains on."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step, each on its own part of the responses."""
        return self.responses_per_step // self.policy.train_global_batch_size

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of each algorithm, and the sections that only DPO and reward models have."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from nemo_rl_moe.config.schema_base import (
    Coefficient,
    PositiveCoefficient,
    RenamedValue,
    StrictModel,
    SupervisedLoopConfig,
)
from nemo_rl_moe.config.schema_grpo import (
    GeneratingPolicyConfig,
    GenerationLoggerConfig,
    GRPOConfig,
    PolicyGradientLossConfig,
    generating,
)
from nemo_rl_moe.config.schema_mixture import MixedPromptDataConfig, MixtureConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.config.schema_reward_model import RewardModelConfig
from nemo_rl_moe.config.schema_run import (
    GENERATION_ROLE,
    REWARD_MODEL_ROLE,
    CheckpointingConfig,
    ClusterConfig,
    DataConfig,
    LoggerConfig,
    PairDataConfig,
    SampleDataConfig,
    ScoredPairDataConfig,
)


def _sigmoid_is_dpo(value: Any) -> Any:
    return "sigmoid" if value == "dpo" else value


PreferenceLossType = Annotated[
    Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down"], BeforeValidator(_sigmoid_is_dpo)
]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5)]


class PreferenceLossConfig(StrictModel):
    """The loss of direct preference optimization."""

    preference_loss_type: PreferenceLossType
    """sigmoid (or dpo): DPO. robust: DPO, unbiased under flipped labels. hinge: zero beyond a margin of 1. ipo: squared
    distance of the margin from 1 / (2 x `reference_policy_kl_penalty`). apo_zero: for chosen responses that are better
    than the reference model's responses. apo_down: for chosen responses that are worse."""
    reference_policy_kl_penalty: PositiveCoefficient
    """Beta of DPO: how strongly the policy is held near the reference model."""
    label_smoothing: BelowHalf
    """Assumed share of flipped labels, for sigmoid (conservative DPO) and robust. 0: none."""
    preference_average_log_probs: bool
    """true: compare the mean log-probability of each response's tokens, so that its length does not count. false:
    compare the sums."""
    preference_loss_weight: Coefficient
    """Weight of the preference loss."""
    sft_loss_weight: Coefficient
    """Weight of the negative log-likelihood of the chosen responses. 0: the loss does not contain it."""
    sft_average_log_probs: bool
    """true: the log-likelihood of a chosen response is the mean over its tokens. false: the sum."""


class DPOConfig(PreferenceLossConfig, SupervisedLoopConfig):
    """Direct preference optimization: the loop and its loss. A sample is a pair of responses."""

    reference_logprobs: Annotated[Literal["in_step", "precompute"], RenamedValue("beforehand", "precompute")]
    """When the reference model, which is the initial policy, computes its log-probabilities. in_step: in each step, so
    that memory holds two sets of weights. precompute: for all pairs before the first step, so that memory holds one
    set."""


class RMConfig(SupervisedLoopConfig):
    """Training of a reward model: the loop and its loss. A sample is a pair of responses."""

    center_rewards_coefficient: Coefficient
    """Weight of the squared sum of a pair's two scores in the loss, which keeps scores around 0. 0: the loss does not
    contain it."""


class SFTConfig(SupervisedLoopConfig):
    """The loop of supervised fine-tuning."""


class MasterConfig(StrictModel):
    """The sections that every algorithm has."""

    checkpointing: CheckpointingConfig
    """When checkpoints are saved, and which are kept."""
    policy: PolicyConfig
    """The model that is trained, its batches and its optimizer."""
    logger: LoggerConfig
    """Destinations of metrics."""
    cluster: ClusterConfig
    """Machines and workers of the run."""
    data: DataConfig
    """The records to train on."""

    @property
    def data_parallel_size(self) -> int:
        """Number of copies of the model. Each copy processes its part of a global batch."""
        return self.cluster.world_size // self.policy.megatron_cfg.model_parallel_size


class SFTMasterConfig(MasterConfig):
    """The configuration of a run of supervised fine-tuning."""

    sft: SFTConfig
    """Length, validations and seed of the training loop."""
    data: SampleDataConfig
    """The samples to train on and to validate with."""


class PairMasterConfig(MasterConfig):
    """The configuration of a run that learns from pairs of responses. The batch sizes count pairs."""

    data: PairDataConfig
    """The pairs to train on and to validate with."""


class DPOMasterConfig(PairMasterConfig):
    """The configuration of a run of direct preference optimization. The batch sizes count pairs."""

    dpo: DPOConfig
    """The loop and its loss."""


class RMMasterConfig(PairMasterConfig):
    """The configuration of a run that trains a reward model. The batch sizes count pairs."""

    rm: RMConfig
    """The loop and its loss."""
    data: ScoredPairDataConfig
    """The pairs to train on and to validate with."""


class GRPOMasterConfig(MasterConfig):
    """The configuration of a run of group relative policy optimization."""

    grpo: GRPOConfig
    """Length, validations and seed of the training loop."""
    loss_fn: PolicyGradientLossConfig
    """The loss."""
    policy: GeneratingPolicyConfig
    """The model and its sampling."""
    env: MixtureConfig
    """How trajectories are made and scored."""
    reward_model: RewardModelConfig | None
    """Model whose score is added to the reward, or is the only reward (`env.reward.kind: reward_model`).
    `cluster.roles.reward_model` assigns its machines. null: no reward model."""
    data: MixedPromptDataConfig
    """The prompts to train on and to validate with."""
    logger: GenerationLoggerConfig
    """Destinations of metrics and samples."""

    @property
    def given_response_key(self) -> str | None:
        """Key of the response in each record of the training prompts. None: the policy samples the responses."""
        return None

    @property
    def responses_per_step(self) -> int:
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps in one step, each on a different part of the responses."""
        return self.responses_per_step // self.policy.train_global_batch_size

    @property
    def named_reward_weights(self) -> Mapping[str, float]:
        """Name of a reward -> its weight, for rewards that an estimator may compare separately. Includes the reward
        model's score. Empty if the rewards have no names."""
        weights = self.env.shared_reward_weights or {}
        if not weights or self.reward_model is None:
            return weights
        return {**weights, REWARD_MODEL_ROLE: self.reward_model.weight}


def engines_share_gpus(config: MasterConfig) -> bool:
    """Return whether generation engines with their own copy of the weights run on the policy's GPUs."""
    generates = generating(config.policy)
    has_engines = generates is not None and not generates.generation.engine.shares_weights
    return has_engines and config.cluster.gpus_per_node > 0 and GENERATION_ROLE not in config.cluster.roles

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections that only GRPO has, and the sections to which it adds keys."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from nemo_rl_moe.config.engine import Engine
from nemo_rl_moe.config.engines import EngineName, EngineSections, find_engine
from nemo_rl_moe.config.schema_base import (
    Coefficient,
    CustomCode,
    NameIn,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveCoefficient,
    PositiveFloat,
    PositiveInt,
    PositiveRatio,
    Ratio,
    RewardSize,
    Seed,
    Share,
    StrictModel,
    Temperature,
    Text,
    WholeOrLess,
)
from nemo_rl_moe.config.schema_policy import MegatronConfig, PolicyConfig
from nemo_rl_moe.config.schema_rollouts import RolloutsConfig
from nemo_rl_moe.config.schema_run import DataConfig, LoggerConfig
from nemo_rl_moe.rl.corrections import CORRECTIONS
from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.objectives import OBJECTIVES

Section = TypeVar("Section", bound=StrictModel)
NonPositiveFloat = Annotated[float, Field(le=0)]
AtLeastOne = Annotated[float, Field(ge=1, le=1_000_000_000)]


class AdvantageConfig(StrictModel):
    """Estimator of advantages from rewards."""

    name: Annotated[str, NameIn(ESTIMATORS)] | CustomCode
    """Name of an estimator in `rl/estimators`, which has a module for each, or `package.module:function`. A function
    takes `EstimatorInputs` and returns an advantage for each response or for each of its tokens."""
    use_leave_one_out_baseline: bool
    """true: compare a response with the mean of the other responses of its group. false: with the mean of all responses
    of the group."""
    normalize_rewards: bool
    """Divide advantages by a standard deviation, over the group or over the step, depending on the estimator."""
    normalize_over: Literal["group", "batch"]
    """The rewards whose standard deviation is the divisor. group: rewards of the same prompt. batch: rewards of the
    entire step."""


class RewardShapingConfig(StrictModel):
    """Soft penalty of long responses (DAPO, eq. 13)."""

    enabled: bool
    """Reduce the reward of responses whose length comes near `max_new_tokens`."""
    overlong_buffer_length: PositiveInt
    """Number of tokens before `max_new_tokens` over which the penalty grows."""
    overlong_buffer_penalty: RewardSize
    """Penalty of a trajectory whose longest response has `max_new_tokens` tokens."""


class GRPOConfig(StrictModel):
    """The loop of group relative policy optimization."""

    num_prompts_per_step: PositiveInt
    """Number of prompts of one step."""
    num_generations_per_prompt: PositiveInt
    """Number of responses in a group, which answer the same prompt. At least 2, or 1 with an estimator that compares no
    groups."""
    rollouts: RolloutsConfig
    """When responses are generated: alternating with training, or ahead of it."""
    max_num_epochs: PositiveInt
    """The run ends after this many passes over the prompts."""
    max_num_steps: PositiveInt | None
    """The run ends after this many steps, unless `max_num_epochs` ends it earlier. null: only `max_num_epochs`
    counts."""
    adv_estimator: AdvantageConfig
    """Estimator of advantages from rewards."""
    advantage_clip_low: NonPositiveFloat | None
    """Lower bound of advantages, in the estimator's units. Lower advantages are raised to the bound. null: no bound."""
    advantage_clip_high: NonNegativeFloat | None
    """Upper bound of advantages, in the estimator's units. Higher advantages are lowered to the bound. null: no
    bound."""
    use_dynamic_sampling: bool
    """Replace each group whose responses all got the same reward by a new group (DAPO). Such a group has no
    gradient."""
    dynamic_sampling_max_groups: PositiveInt | None
    """Maximum number of groups that are generated for a step with `use_dynamic_sampling`. When it is reached, no
    further group is replaced. Must be above `num_prompts_per_step`. null: ten times `num_prompts_per_step`."""
    overlong_filtering: bool
    """Exclude responses that were truncated at the length limit from the loss (DAPO)."""
    zero_variance_filtering: bool
    """Exclude groups whose responses all got the same reward from the loss, so that they count in none of its
    means."""
    reward_shaping: RewardShapingConfig
    """Soft penalty of long responses."""
    val_period: NonNegativeInt
    """Validate after every this many steps. 0: never."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    max_val_samples: PositiveInt | None
    """Number of prompts in one validation. null: all held-out prompts."""
    val_num_generations: PositiveInt
    """Number of responses to each held-out prompt. Must be 1 if validation is greedy. pass@k is reported for k equal to
    this number and to each power of two below it."""
    val_temperature: Annotated[float, Field(ge=0, le=100)]
    """Sampling temperature of validation. 0: greedy."""
    max_consecutive_failed_steps: PositiveInt | None
    """The run stops after this many steps in a row in which the scoring of all responses failed. Validations count as
    steps. null: never."""
    seed: Seed
    """Seed of the order of the prompts, of sampling and of dropout."""

    @property
    def most_groups(self) -> int:
        return self.dynamic_sampling_max_groups or 10 * self.num_prompts_per_step


class PolicyGradientLossConfig(StrictModel):
    """The loss of the policy."""

    ratio_clip_min: WholeOrLess
    """The probability ratio is clipped from below at 1 minus this value. 1: no lower bound. gmpo: the lower bound is
    exp(-value). dppo_tv, dppo_kl: largest divergence of a token with a negative advantage."""
    ratio_clip_max: Ratio
    """The probability ratio is clipped from above at 1 plus this value. gmpo: the upper bound is exp(value). dppo_tv,
    dppo_kl: largest divergence of a token with a positive advantage."""
    ratio_clip_c: AtLeastOne | None
    """Dual clip: if the advantage is negative, the loss of a token is at most this value times the advantage's size.
    dppo_tv, dppo_kl: the largest ratio that weighs a token. null: no such bound."""
    objective: Annotated[str, NameIn(OBJECTIVES)] | CustomCode
    """clipped: PPO's clipped surrogate. cispo: the clipped ratio is a constant weight of the log-probability.
    reinforce: the log-probability, without a ratio. sapo: a smooth gate of the ratio. gmpo: the geometric mean of the
    clipped ratios of a sequence. dppo_tv, dppo_kl: tokens whose probability is too far from the engine's are dropped,
    by total variation or by KL divergence. clip_cov, kl_cov: tokens with a large covariance of log-probability and
    advantage are dropped, or penalised. `package.module:function`: your function takes `ObjectiveInputs` and returns
    the loss of each token."""
    sapo_temperature_pos: PositiveCoefficient
    """sapo: temperature of the gate for tokens with a positive advantage. A larger one lets the gate close faster."""
    sapo_temperature_neg: PositiveCoefficient
    """sapo: temperature of the gate for other tokens."""
    cov_ratio: Share
    """clip_cov, kl_cov: share of the trained tokens of a step that is selected, at least one token."""
    clip_cov_min: Coefficient
    """clip_cov: tokens with a larger covariance may be selected."""
    clip_cov_max: PositiveCoefficient
    """clip_cov: tokens with a smaller covariance may be selected."""
    kl_cov_coef: PositiveCoefficient
    """kl_cov: weight of the penalty on the size of a selected token's log-ratio."""
    sequence_level_importance_ratios: bool
    """Use one ratio for each sequence, the geometric mean over its tokens (GSPO). Needs `token_level_loss: false`."""
    token_level_loss: bool
    """true: the loss is the mean over all tokens of the global batch. false: the loss is the mean over its sequences,
    of each sequence's mean over tokens."""
    length_normalizer: PositiveInt | None
    """With `token_level_loss: false`, a constant that divides the sum over each sequence's tokens (Dr. GRPO), such as
    `max_new_tokens`. null: divide by the number of the sequence's tokens."""
    force_on_policy_ratio: Literal["auto", "always", "never"]
    """When to take the ratio as 1 and skip the log-probability pass. auto: if a step is one update, on tokens that were
    sampled by the weights before this update, so that the ratio is exactly 1. Older tokens without an
    importance-sampling correction get the ratio of the policy to the weights that sampled them."""
    reference_policy_kl_penalty: Coefficient
    """Weight of the policy's divergence from the reference model, which is the policy at the start of the run. 0: no
    reference model."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"]
    """Estimator of the divergence."""
    reference_policy_kl_gradient: Literal["estimate", "divergence"]
    """Gradient of the penalty in the loss. estimate: gradient of the estimate, as in GRPO. divergence: gradient of the
    divergence itself. It also contains the effect of the weights on which tokens are sampled."""
    use_kl_in_reward: bool
    """Subtract the divergence, estimated by k1, from the reward of each response instead of adding it to the loss."""
    kl_output_clamp_value: PositiveRatio | None
    """Maximum size of the estimated divergence at one token, in nats. A clamped token has no gradient. null: no
    limit."""
    entropy_bonus: Coefficient
    """Weight of the policy's exact entropy. The weighted entropy is subtracted from the loss. 0: no entropy is
    computed."""
    importance_sampling_correction: Annotated[str, NameIn(CORRECTIONS)]
    """Weight of each token in the loss, from the ratio of its training probability to its generation probability. none:
    1. truncated: the ratio, clipped to the bounds. icepop: the ratio, but tokens whose ratio is outside of the bounds
    are dropped. sequence_mask: the ratio, but sequences whose ratios have a geometric mean outside of the bounds are
    dropped."""
    importance_sampling_level: Literal["token", "sequence"]
    """The ratio that truncated and icepop use. token: of each token. sequence: of the entire sequence."""
    importance_sampling_ratio_min: Ratio | None
    """Lower bound of the ratio. null: no bound with truncated, 0.5 with icepop."""
    importance_sampling_ratio_max: PositiveRatio
    """Upper bound of the ratio."""
    sampling_mask: Literal["none", "replay"]
    """How log-probabilities of tokens that were sampled with top-p or top-k are normalised. none: over the full
    vocabulary. replay: over the tokens that top-p and top-k left to sample from, in rollout, training and reference
    model. The engine returns these tokens, at most `policy.generation.top_k` for each sampled token."""

    @property
    def importance_sampling_lower_bound(self) -> float:
        """Lower bound of the importance-sampling ratio. 0: no bound."""
        if self.importance_sampling_ratio_min is not None:
            return self.importance_sampling_ratio_min
        return CORRECTIONS[self.importance_sampling_correction].lower_bound or 0.0


class RefitCheckConfig(StrictModel):
    """A check that the trainer's weights have arrived in an engine that keeps a copy."""

    enabled: bool
    """Let engine and trainer compute log-probabilities of the same tokens after each refit, and react (`on_failure`) if
    they differ."""
    num_sequences: PositiveInt
    """Number of sequences to score. Their random tokens stay the same during the run."""
    num_tokens: Annotated[int, Field(ge=2)]
    """Number of tokens of each sequence."""
    max_logprob_gap: PositiveFloat | None
    """Largest difference of a token's two log-probabilities, in nats, that counts as rounding. null: in float32 the
    limit is 1e-4. In other formats the mean difference may be up to four times the largest mean of the run's earlier
    refits, within 0.03 to 0.5."""
    on_failure: Literal["stop", "refit"]
    """Reaction to a larger difference. stop: end the run. refit: send the weights once more, and end the run if the
    difference remains."""


class GenerationConfig(EngineSections):
    """Sampling of responses."""

    backend: EngineName
    """The generation engine. megatron: the training workers, with the trained weights. megatron_separate: separate
    workers of Megatron-Core with a copy of the weights. vllm: vLLM engines with a copy of the weights.
    `package.module:ENGINE`: your engine's record or function."""
    weight_transport: Literal["files", "gloo", "nccl", "cuda_ipc"]
    """How the weights get to the engines. files: through shared memory or, between machines, a disk. gloo: over the
    network, through the hosts' memory. nccl: from GPU to GPU, for engines with separate GPUs. cuda_ipc: engines read
    the trainer's memory on the GPUs that they share."""
    lora_refit: Literal["merged", "adapter"]
    """Weights that an engine with a copy gets if the policy has adapters. merged: all weights, with the adapters added
    to them. adapter: only the adapters. The engine keeps the base model and applies the adapters to it."""
    refit_check: RefitCheckConfig
    """A check that weights have arrived, for engines that keep a copy."""
    max_new_tokens: PositiveInt
    """Maximum number of tokens in a response, including its end token."""
    temperature: Temperature
    """Divisor of the logits, in sampling and in training."""
    top_p: Share
    """Sample only from the most likely tokens: the fewest whose probabilities add up to this value. 1: from all
    tokens."""
    top_k: PositiveInt | None
    """Sample only from this number of most likely tokens. null: from all tokens."""
    stop_token_ids: list[NonNegativeInt] | None
    """Ids of tokens that end a response. null: the end tokens of the tokenizer, `generation_config.json` and
    `config.json`. []: no token, so that only the length limit and `stop_strings` end a response."""
    stop_strings: list[Text] | None
    """Texts that end a response. null: none. []: none, but the engine reads the tokenizer, so that requests to a served
    model can have some."""
    max_batch_size: PositiveInt | None
    """Maximum number of sequences that one rank generates at the same time. null: all sequences of the rank."""

    @property
    def engine(self) -> Engine:
        """Record of the engine. Raises `ConfigurationError` if the name is unknown."""
        return find_engine(self.backend)

    def section_of(self, kind: type[Section]) -> Section:
        """Return the engine's section that has this class. Raises AttributeError if there is none, so that a rule that
        needs the section is skipped."""
        for section in vars(self).values():
            if isinstance(section, kind):
                return section
        raise AttributeError(f"policy.generation has no section {kind.__name__}")


class RoutingMeasurementsConfig(StrictModel):
    """Additional log-probability passes over a sample of a step's sequences, to measure effects of MoE routing."""

    every_n_steps: PositiveInt | None
    """Number of steps from one measurement to the next. null: never."""
    share_of_tokens: Share
    """Share of the trained tokens to measure, in complete sequences."""
    save_capture: bool
    """Keep the measured tokens, routes, log-probabilities and rewards in `capture` in the run's folder, which
    `nemo-rl-moe audit` reads. Costs one more pass over an eighth of the measured tokens."""


class RolloutMegatronConfig(MegatronConfig):
    """Layout, training and routing of a model that generates, in Megatron-Core."""

    capture_routing: bool
    """Keep the routed experts of each rollout's tokens, and compare them with the experts that training chooses. vLLM
    on GPUs returns the experts only with `routing_replay: rollout`, because captured routes exclude a prefix cache."""
    routing_replay: Literal["none", "rollout", "old_policy"]
    """Which experts the training pass uses. Their probabilities are always computed anew. none: the experts that the
    routers choose. rollout: the experts of the rollout, also in log-probability passes (R3). old_policy: the experts of
    the log-probability pass before the first update of a step (R2)."""
    routing_replay_on_anomaly: Literal["stop", "warn"]
    """Reaction to replayed routes that cannot be right, because they belong to another layer, token or sequence, or
    lack experts. stop: end the run. warn: continue. Alerts report such routes in both cases, and also without
    replay."""
    routing_replay_load: Literal["live", "replayed"]
    """Which experts auxiliary losses and the expert bias count under replay. live: the experts that the routers would
    choose, because the losses should balance this choice. replayed: the experts that are used."""
    indexer_replay: Literal["none", "rollout"]
    """Which tokens attention sees in training, in models with an indexer (DeepSeek-V3.2). none: the indexer's choice.
    rollout: the choice of the rollout's indexer, also in log-probability passes. The engine then returns the
    positions, 4 bytes for each of `index_topk` positions per token and layer."""
    routing_measurements: RoutingMeasurementsConfig
    """Measures the mismatch of rollout and training by cause, its noise floor, and the drift of routing. Needs
    `capture_routing`."""
    experts_by_advantage: bool
    """Measure how far experts specialise in tokens with high or low advantages, beyond chance. Needs
    `track_moe_metrics`."""
    experts_by_writer: bool
    """Count the tokens of each expert by their source (prompt, model or environment), in steps with conversations of
    several turns. Needs `track_moe_metrics`."""


class GeneratingPolicyConfig(PolicyConfig):
    """The model that is trained, and its sampling."""

    megatron_cfg: RolloutMegatronConfig
    """Layout, training and routing of the model in Megatron-Core."""
    logprob_batch_size: PositiveInt
    """Number of samples in one log-probability pass on one rank. Packing and dynamic batching fill the pass by tokens
    instead."""
    offload_optimizer_for_generation: bool
    """Before responses are generated, move the optimizer's state to the host's memory and free the gradient buffers.
    Move the state back before training. State that `optimizer_cpu_offload` keeps on the host stays there."""
    offload_optimizer_for_logprob: bool
    """Move the optimizer's state to the host also before log-probability passes (see
    `offload_optimizer_for_generation`)."""
    generation: GenerationConfig
    """Sampling of responses."""


def generating(policy: PolicyConfig) -> GeneratingPolicyConfig | None:
    """Return the policy's section if it has settings for generation, else None."""
    return policy if isinstance(policy, GeneratingPolicyConfig) else None


def rollouts_in_float32(policy: GeneratingPolicyConfig) -> bool:
    """Return whether the generation engine and the trainer both compute in float32."""
    return {policy.precision, policy.generation.engine.number_format(policy)} == {"float32"}


class PromptSourceConfig(StrictModel):
    """Source of one set of prompts."""

    path: PathText | None
    """A `.jsonl` file, a `.txt` file with one prompt on each line (for rewards without an answer), or a name or folder
    that `datasets.load_dataset` takes. null: sample prompts from the task of `env.reward`, or use the data of the
    verifiers environment. A prompt that occurs several times is used once per epoch (`grpo.max_num_epochs` repeats
    all). Held-out prompts that are also training prompts are skipped, unless both sets have the same path."""
    split: Text
    """Split of a dataset. A `.jsonl` file ignores it. For a verifiers environment, `train` is its data for training,
    and any other split is its data for evaluation."""
    num_items: PositiveInt | None
    """Number of prompts to sample if `path` is null, otherwise the maximum number of distinct prompts to read. null:
    all."""
    seed: Seed
    """Seed for sampling prompts if `path` is null. Ignored for prompts that are read from `path`."""


class PromptDataConfig(DataConfig):
    """The prompts to train on and to validate with."""

    train: PromptSourceConfig
    """The prompts to train on."""
    validation: PromptSourceConfig | None
    """The held-out prompts. null: no validation, regardless of `grpo.val_*` and a `val:` metric."""
    prompt_key: Text
    """Key of a record that holds the prompt, which is a text or a list of messages. Dots reach into objects.
    `prompt_key` and `answer_key` are ignored for sampled prompts."""
    prompt_template: Text | None
    """Text of the user's last turn, in which `{prompt}` is replaced by the prompt. Applies to sampled prompts too.
    null: the prompt alone."""
    answer_key: Text
    """Key of a record that holds the correct answer. Dots reach into objects."""
    shuffle: bool
    """Shuffle the training prompts anew for each epoch, with `grpo.seed`."""


class GenerationLoggerConfig(LoggerConfig):
    """Destinations of metrics and of generated samples."""

    num_samples_to_print: NonNegativeInt
    """Number of responses shown on the console after each validation."""
    num_samples_to_save: NonNegativeInt | None
    """Number of responses of each step and each validation to write to `samples.jsonl`. null: all."""

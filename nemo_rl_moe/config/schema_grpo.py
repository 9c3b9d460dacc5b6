# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The sections that only GRPO has, and those to which it adds keys."""

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
    """An estimator of `rl/estimators`, one module each; otherwise `package.module:function`, which takes
    `EstimatorInputs` and returns an advantage for each response, or for each of its tokens."""
    use_leave_one_out_baseline: bool
    """Compare a response with the mean of the others of its group, not with the mean that includes it."""
    normalize_rewards: bool
    """Divide by the standard deviation, of the group or of the step as the estimator says."""
    normalize_over: Literal["group", "batch"]
    """The rewards whose standard deviation divides: group: of the same prompt; batch: of all responses of the step."""


class RewardShapingConfig(StrictModel):
    """Soft penalty of long responses (DAPO, eq. 13)."""

    enabled: bool
    """Reduce the reward of responses that come near `max_new_tokens`."""
    overlong_buffer_length: PositiveInt
    """Number of tokens before `max_new_tokens` over which the penalty grows."""
    overlong_buffer_penalty: RewardSize
    """Reward that a trajectory loses whose longest response has full length."""


class GRPOConfig(StrictModel):
    """The loop of group relative policy optimization."""

    num_prompts_per_step: PositiveInt
    """Prompts of one step."""
    num_generations_per_prompt: PositiveInt
    """Responses to each prompt: a group. 2 or more, or 1 with an estimator that compares no groups."""
    rollouts: RolloutsConfig
    """When responses are generated: in turns with training, or ahead of it."""
    max_num_epochs: PositiveInt
    """Passes over the prompts after which the run ends."""
    max_num_steps: PositiveInt | None
    """Steps after which the run ends, if that comes first; null: epochs alone decide."""
    adv_estimator: AdvantageConfig
    """Estimator of advantages from rewards."""
    advantage_clip_low: NonPositiveFloat | None
    """Lowest advantage, in the estimator's units: what is below is raised to it; null: none."""
    advantage_clip_high: NonNegativeFloat | None
    """Highest advantage: what is above is lowered to it; null: none."""
    use_dynamic_sampling: bool
    """Replace groups whose responses all got the same reward, which teach nothing (DAPO)."""
    dynamic_sampling_max_groups: PositiveInt | None
    """Most groups that are generated for a step. At the bound, groups are trained on as they come. With
    `use_dynamic_sampling` it must be above `num_prompts_per_step`. null: ten times as many."""
    overlong_filtering: bool
    """Leave responses that were truncated at the length limit out of the loss (DAPO)."""
    reward_shaping: RewardShapingConfig
    """Soft penalty of long responses."""
    val_period: NonNegativeInt
    """Validate each time this many steps are done; 0: never."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    max_val_samples: PositiveInt | None
    """Prompts of one validation; null: all held-out ones."""
    val_num_generations: PositiveInt
    """Responses to each held-out prompt; with n of them, pass@k is reported for the powers of two up to n, and n.
    Greedy validation takes 1."""
    val_temperature: Annotated[float, Field(ge=0, le=100)]
    """Temperature of validation; 0: greedy."""
    max_consecutive_failed_steps: PositiveInt | None
    """Steps in a row, validations included, in which the environment fails to score every response, after which the run
    stops with the environment's error; null: never."""
    seed: Seed
    """Seed of the order of the prompts, of sampling and of dropout."""

    @property
    def most_groups(self) -> int:
        """Return the most groups that dynamic sampling generates for a step."""
        return self.dynamic_sampling_max_groups or 10 * self.num_prompts_per_step


class PolicyGradientLossConfig(StrictModel):
    """The loss that the policy is trained with."""

    ratio_clip_min: WholeOrLess
    """The probability ratio is clipped from below at 1 minus this; 1: it is not."""
    ratio_clip_max: Ratio
    """The probability ratio is clipped from above at 1 plus this."""
    ratio_clip_c: AtLeastOne | None
    """Dual clip: with a negative advantage the loss is at most this times its size; null: no such limit."""
    objective: Annotated[str, NameIn(OBJECTIVES)] | CustomCode
    """clipped: the clipped surrogate of PPO; cispo: the clipped ratio is a constant weight of the log-probability;
    reinforce: the log-probability alone, without a ratio; otherwise `package.module:function`, which takes
    `ObjectiveInputs` and returns the loss of each token."""
    sequence_level_importance_ratios: bool
    """One ratio for each sequence, the geometric mean of its tokens' (GSPO); with `token_level_loss: false`."""
    token_level_loss: bool
    """true: mean over all tokens of the global batch; false: mean over its sequences of each one's mean."""
    length_normalizer: PositiveInt | None
    """With `token_level_loss: false`, the number that the sum over each sequence's tokens is divided by instead of the
    number of these tokens, whatever its length (Dr. GRPO), such as `max_new_tokens`; null: the number of tokens."""
    force_on_policy_ratio: Literal["auto", "always", "never"]
    """Take the ratio as 1 without a log-probability pass; auto: where a step is one update on tokens that the weights
    before it have sampled, so that it is exact. Of older tokens, without an importance-sampling correction, the ratio
    is to the weights that sampled them."""
    reference_policy_kl_penalty: Coefficient
    """Weight of the divergence from the model at the start of the run; 0: no reference model."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"]
    """Estimator of the divergence."""
    reference_policy_kl_gradient: Literal["estimate", "divergence"]
    """Gradient of the penalty in the loss: of the estimate, as in GRPO; or of the divergence itself, which includes the
    effect on the choice of tokens."""
    use_kl_in_reward: bool
    """Take the divergence, by k1, from the reward of each response instead of adding it to the loss."""
    kl_output_clamp_value: PositiveRatio | None
    """Largest size of the estimate at one token, in nats, beyond which it has no gradient; null: no limit."""
    entropy_bonus: Coefficient
    """Weight of the policy's exact entropy, which is subtracted from the loss; 0: none, and no entropy is computed."""
    importance_sampling_correction: Annotated[str, NameIn(CORRECTIONS)]
    """Weight tokens by training over generation probability: truncated: clipped to the bounds; icepop: drop tokens
    outside both; sequence_mask: unclipped, but drop sequences whose geometric mean is outside both."""
    importance_sampling_level: Literal["token", "sequence"]
    """Probabilities that truncated and icepop compare: of each token, or of the whole sequence."""
    importance_sampling_ratio_min: Ratio | None
    """Lower bound; null: none with truncated, 0.5 with icepop."""
    importance_sampling_ratio_max: PositiveRatio
    """Upper bound."""
    sampling_mask: Literal["none", "replay"]
    """Log-probabilities of tokens that top-p or top-k chose among few. none: over the whole vocabulary; replay: of
    rollout, training, and reference model over the tokens that the engine drew each one from, of which it returns at
    most `policy.generation.top_k` for each token."""

    @property
    def importance_sampling_lower_bound(self) -> float:
        """Lower bound of the importance-sampling ratio; 0 where there is none."""
        if self.importance_sampling_ratio_min is not None:
            return self.importance_sampling_ratio_min
        return CORRECTIONS[self.importance_sampling_correction].lower_bound or 0.0


class RefitCheckConfig(StrictModel):
    """Proof that the trainer's weights have arrived in an engine that keeps a copy."""

    enabled: bool
    """After each refit, engine and trainer score the same tokens; where they differ, the run stops."""
    num_sequences: PositiveInt
    """Sequences to score, of random tokens that stay the same."""
    num_tokens: Annotated[int, Field(ge=2)]
    """Tokens of each."""
    max_logprob_gap: PositiveFloat | None
    """Largest difference of a token's log-probabilities, in nats, that counts as rounding; null: 1e-4 in float32; in
    other formats the mean difference may be four times that of the run's earlier refits, at least 0.03 and at most
    0.5."""
    on_failure: Literal["stop", "refit"]
    """stop: end the run; refit: send the weights once more, and end the run if that does not help."""


class GenerationConfig(EngineSections):
    """Sampling of responses."""

    backend: EngineName
    """megatron: the training workers themselves, with the weights that they train; megatron_separate: workers of
    Megatron-Core beside them, each with a copy of the weights; vllm: engines of vLLM, with a copy; otherwise the record
    of an engine of your own, or a function that makes one."""
    weight_transport: Literal["files", "gloo", "nccl", "cuda_ipc"]
    """files: the engines' weights travel through shared memory or, between machines, a disk; nccl: from GPU to GPU, for
    engines with GPUs of their own; cuda_ipc: engines read them in the trainer's GPUs, which they share; gloo: over the
    network, through the hosts' memory."""
    lora_refit: Literal["merged", "adapter"]
    """Weights that an engine with a copy gets of a policy with adapters. merged: all of them, with the adapters added;
    adapter: the adapters alone, for engines that put them beside a base of their own."""
    refit_check: RefitCheckConfig
    """Proof that weights have arrived, for engines that keep a copy."""
    max_new_tokens: PositiveInt
    """Most tokens of a response, its end token included."""
    temperature: Temperature
    """Divides the logits, in training too."""
    top_p: Share
    """Sample from the fewest most likely tokens whose probabilities add up to this; 1: from all."""
    top_k: PositiveInt | None
    """Sample from this many most likely tokens; null: from all."""
    stop_token_ids: list[NonNegativeInt] | None
    """Tokens that end a response; null: those that the tokenizer, `generation_config.json` and `config.json` name;
    empty: none, so that the length alone ends it."""
    stop_strings: list[Text] | None
    """Texts that end a response; null: none."""
    max_batch_size: PositiveInt | None
    """Most sequences that one rank generates at a time; null: all of its share."""

    @property
    def engine(self) -> Engine:
        """Record of the engine; raises `ConfigurationError` where there is none by this name."""
        return find_engine(self.backend)

    def section_of(self, kind: type[Section]) -> Section:
        """Return the section of an engine, by its class.

        Raises:
            AttributeError: There is none; rules are skipped then.
        """
        for section in vars(self).values():
            if isinstance(section, kind):
                return section
        raise AttributeError(f"policy.generation has no section {kind.__name__}")


class RoutingMeasurementsConfig(StrictModel):
    """Further log-probability passes over a sample of a step's sequences, which explain its routing."""

    every_n_steps: PositiveInt | None
    """Steps from one measurement to the next; null: never."""
    share_of_tokens: Share
    """Share of the trained tokens that are measured, in whole sequences."""
    save_capture: bool
    """Keep what is measured (tokens, routes, log-probabilities, rewards) in the folder `capture` of the run's, which
    `nemo-rl-moe audit` reads; one more pass over an eighth of the measured tokens."""


class RolloutMegatronConfig(MegatronConfig):
    """Layout and training of a model that generates: its routing in rollouts and in training besides."""

    capture_routing: bool
    """Keep the routed experts of each rollout's tokens, and compare those of training with them. vLLM on GPUs returns
    them only for a replay, because capture disables CUDA graphs."""
    routing_replay: Literal["none", "rollout", "old_policy"]
    """Experts that routers take in training, with their present probabilities. none: the routers' own; rollout: those
    of the rollout, also in log-probability passes (R3); old_policy: those of the log-probability pass before the first
    update of a step (R2)."""
    routing_replay_on_anomaly: Literal["stop", "warn"]
    """Action on replayed routes that cannot be right (of another layer, token or sequence, or no experts at all): stop:
    end the run; warn: go on. Alerts report them either way, and without replay."""
    routing_replay_load: Literal["live", "replayed"]
    """Experts that auxiliary losses and the expert bias count under replay. live: those that the routers would choose,
    and that are to be balanced; replayed: those that they take."""
    routing_measurements: RoutingMeasurementsConfig
    """Mismatch of rollout and training by its causes, its noise floor, and drift of routing; with a capture only."""
    experts_by_advantage: bool
    """Measure how far the experts of a layer specialise in responses of high and of low advantage, beyond chance; with
    `track_moe_metrics`."""
    experts_by_writer: bool
    """Count the tokens of each expert by who wrote them (the prompt, the model or its environment), in steps with
    conversations of several turns; with `track_moe_metrics`."""


class GeneratingPolicyConfig(PolicyConfig):
    """The model that is trained, and how it generates."""

    megatron_cfg: RolloutMegatronConfig
    """Layout and training of the model in Megatron-Core, and its routing in rollouts and in training."""
    logprob_batch_size: PositiveInt
    """Samples of one log-probability pass on one rank; packing and dynamic batching fill it by tokens instead."""
    offload_optimizer_for_generation: bool
    """Move the optimizer's state to the host's memory and free the gradients' buffers before responses are generated,
    and back before training. What `optimizer_cpu_offload` keeps on the host is there already."""
    offload_optimizer_for_logprob: bool
    """The same before log-probability passes."""
    generation: GenerationConfig
    """Sampling of responses."""


def generating(policy: PolicyConfig) -> GeneratingPolicyConfig | None:
    """Return the policy's section where it says how to generate; None where the policy is trained or measured alone."""
    return policy if isinstance(policy, GeneratingPolicyConfig) else None


def rollouts_in_float32(policy: GeneratingPolicyConfig) -> bool:
    """Return whether the engine that makes the captures and the trainer are both known to compute in float32."""
    return {policy.precision, policy.generation.engine.number_format(policy)} == {"float32"}


class PromptSourceConfig(StrictModel):
    """Source of one set of prompts."""

    path: PathText | None
    """A `.jsonl` file, a `.txt` file of one prompt a line (for rewards without an answer), or a name or folder that
    `datasets.load_dataset` takes; null: sampled from the task of `env.reward`, or the data of an
    environment of verifiers. A prompt that stands there several times is
    taken once: `grpo.max_num_epochs` repeats all of them. Held-out prompts that are training prompts too are left out,
    unless both paths are the same."""
    split: Text
    """The split to take of a dataset; a `.jsonl` file has none and ignores it. Of an environment of verifiers, train is
    its data to train on, and any other its data to evaluate with."""
    num_items: PositiveInt | None
    """Number of prompts to draw when `path` is null; otherwise the most to read, repeats not counted,
    null: all."""
    seed: Seed
    """Seed of sampled prompts; prompts that are read have none and ignore it."""


class PromptDataConfig(DataConfig):
    """The prompts to train on and to validate with."""

    train: PromptSourceConfig
    """The prompts to train on."""
    validation: PromptSourceConfig | None
    """The prompts that are held out; null: no validation, whatever `grpo.val_*` and a `val:` metric ask for."""
    prompt_key: Text
    """Key of a record that holds the prompt: text, or a list of messages. Dots reach into objects. Sampled prompts,
    which have no other names for these things, ignore it and `answer_key`."""
    prompt_template: Text | None
    """Text of the user's last turn, with the prompt in place of `{prompt}`; null: the prompt as it is. Applies to
    sampled prompts too."""
    answer_key: Text
    """Key of a record that holds the right answer. Dots reach into objects."""
    shuffle: bool
    """Draw a new order of the training prompts for each epoch, from `grpo.seed`."""


class GenerationLoggerConfig(LoggerConfig):
    """Destinations of metrics and of generated samples."""

    num_samples_to_print: NonNegativeInt
    """Responses shown on the console after each validation."""
    num_samples_to_save: NonNegativeInt | None
    """Responses of each step and each validation written to `samples.jsonl`; null: all."""

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `policy` section: the model, its batches, and its layout and optimizer in Megatron-Core."""

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES, MoeTransformerFields
from nemo_rl_moe.config.schema_base import (
    Coefficient,
    NonNegativeInt,
    PathText,
    PositiveInt,
    PositiveRatio,
    Seed,
    Share,
    StrictModel,
    UnitFloat,
)
from nemo_rl_moe.config.schema_lora import LoraConfig


def _recompute_from_bool(value: Any) -> Any:
    return {False: "none", True: "full"}[value] if isinstance(value, bool) else value


HIGHEST_LEARNING_RATE = 10
"""A larger value is a typing error: Adam moves each weight by about the learning rate in a step."""
LearningRate = Annotated[float, Field(gt=0, le=HIGHEST_LEARNING_RATE)]
LowestLearningRate = Annotated[float, Field(ge=0, le=HIGHEST_LEARNING_RATE)]
WeightDecay = Annotated[float, Field(ge=0, le=10)]
AdamEpsilon = Annotated[float, Field(gt=0, le=1)]
MOST_MINUTES = 1_000_000
ActivationCheckpointing = Annotated[Literal["none", "full", "moe"], BeforeValidator(_recompute_from_bool)]


class TokenizerConfig(StrictModel):
    """The tokenizer, read by `transformers.AutoTokenizer`."""

    name: PathText
    """A folder, or a name on the hub."""
    chat_template: PathText | None
    """A Jinja file that replaces the tokenizer's chat template. null: use the tokenizer's template."""
    corrected_template: Literal["auto", "never"]
    """auto: use this package's corrected template if the tokenizer's template is known to lose parts of some
    conversations (DeepSeek, Mistral). never: use the tokenizer's template. A `chat_template` file has precedence in
    both cases."""


class TokenBudgetConfig(StrictModel):
    """Limits of microbatches by tokens instead of by samples."""

    enabled: bool
    """Divide the global batch into microbatches by tokens. `train_micro_batch_size` is then not used."""
    train_mb_tokens: PositiveInt
    """Maximum number of tokens in one microbatch."""
    train_mb_patches: PositiveInt | None
    """Maximum number of image patches that the vision tower encodes for one microbatch. Equal images count once, and a
    microbatch whose samples all have the same images may exceed the limit. An image token consists of (merge size of
    the tower)^2 patches. null: `train_mb_tokens` is the only limit."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Microbatches of samples of similar length. A microbatch is divided further as long as this saves more padding
    than another microbatch costs."""

    microbatch_overhead_tokens: NonNegativeInt
    """Fixed time of one more microbatch, as the number of tokens that could be computed in that time. A larger number
    gives fewer microbatches and more padding. 0: the least padding."""


class DistributedDataParallelConfig(StrictModel):
    """Megatron-Core's data parallelism."""

    use_distributed_optimizer: bool
    """Shard the optimizer's state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool
    """Gather weights during the next forward pass, if another update of the same step follows. After the last update of
    a step, all weights are gathered at once. Needs `use_distributed_optimizer` and `overlap_grad_reduce`."""
    bucket_size: PositiveInt | None
    """Number of parameters in one bucket. The gradients of a bucket are reduced together, and its weights are gathered
    together. null: Megatron-Core's choice, at least 40 million."""
    grad_reduce_in_fp32: bool
    """Accumulate and reduce gradients in float32."""


class OptimizerConfig(StrictModel):
    """Adam with decoupled weight decay."""

    lr: LearningRate
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: LowestLearningRate | None
    """Learning rate at the end of the decay. Not used with the decay style constant. null: a tenth of `lr`."""
    weight_decay: WeightDecay
    """Weight decay of matrices. Norms and biases are not decayed."""
    adam_beta1: UnitFloat
    """Decay of Adam's first moment."""
    adam_beta2: UnitFloat
    """Decay of Adam's second moment."""
    adam_eps: AdamEpsilon
    """Adam's epsilon."""
    use_precision_aware_optimizer: bool
    """Use Transformer Engine's Adam, which reads gradients in the format of their buffers without float32 copies, and
    keeps moments in the formats `exp_avg_dtype` and `exp_avg_sq_dtype`. With `optimizer_cpu_offload`, Transformer
    Engine is not needed."""
    exp_avg_dtype: Literal["float32", "bfloat16"]
    """Number format of the first moment. bfloat16 needs `use_precision_aware_optimizer`."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16"]
    """Number format of the second moment. bfloat16 needs `use_precision_aware_optimizer`."""
    optimizer_cpu_offload: bool
    """Keep master weights and moments in the host's memory, and update the weights there. Needs
    `use_precision_aware_optimizer`."""
    optimizer_offload_fraction: Share
    """Share of a rank's parameters to which `optimizer_cpu_offload` applies, above 0 and at most 1."""
    overlap_cpu_optimizer_d2h_h2d: bool
    """With `optimizer_cpu_offload`, copy gradients to the host and weights back while other parameters are updated."""

    @property
    def end_lr(self) -> float:
        """Learning rate at the end of the decay: `min_lr`, or a tenth of `lr`."""
        # In decimal, as a user writes it: 3e-3 / 10 in binary is not 3e-4.
        return float(Decimal(repr(self.lr)) / 10) if self.min_lr is None else self.min_lr


class SchedulerConfig(StrictModel):
    """The learning rate over the optimizer's steps, counted from 1. During the warm-up, step `k` trains at `lr * k /
    lr_warmup_iters`. After the warm-up, step `k` trains at the rate that the decay has after `k` of `lr_decay_iters`
    steps. Without a warm-up, it trains at the rate after `k - 1` steps, so that the first step trains at `lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    """Shape of the decay from `lr` to `min_lr`."""
    lr_warmup_iters: NonNegativeInt
    """Number of steps over which the learning rate rises linearly from 0. A run with fewer steps ends within the
    warm-up. 0: no warm-up."""
    lr_decay_iters: PositiveInt | None
    """Step at which `min_lr` is reached, counting the steps of the warm-up. Without a warm-up, `min_lr` is reached at
    the step after it. Must exceed `lr_warmup_iters`. null: the number of steps of the run."""


class MoeMetricsConfig(StrictModel):
    """Settings of load balance metrics, which are logged if `track_moe_metrics` is true."""

    mode: Literal["brief", "detailed"]
    """brief: at most 60 metrics, independent of the model's size. detailed: a few more for each layer."""
    top_k_experts: NonNegativeInt
    """Log this many of the most loaded experts, and as many of the least loaded experts. 0: none."""
    detailed_every_steps: PositiveInt | None
    """In brief mode, log in detail on each step that is a multiple of this number. null: never."""
    what_if_expert_parallel_sizes: list[PositiveInt]
    """Other expert parallel sizes for which the overload factor is predicted from the measured loads. []: none."""


class RouterGradientsConfig(StrictModel):
    """Gradient of the routers from each source: the algorithm's loss, load balancing losses, z-loss. Each source costs
    a forward and backward pass over the measured microbatches. Measuring does not change training."""

    every_n_steps: PositiveInt | None
    """Measure on each step that is a multiple of this number. null: never."""
    num_microbatches: PositiveInt | None
    """Number of microbatches to measure on each data-parallel rank, from the first global batch of the step. An
    interleaved pipeline rounds the number to a multiple of its stages. null: all."""


class MegatronConfig(MoeTransformerFields):
    """Layout and training of the model in Megatron-Core. Any `moe_*` field of its `TransformerConfig` is a key too."""

    tensor_model_parallel_size: PositiveInt
    """Number of ranks that share each matrix."""
    pipeline_model_parallel_size: PositiveInt
    """Number of pipeline stages. Each rank of a pipeline has the layers of one stage."""
    virtual_pipeline_model_parallel_size: PositiveInt | None
    """Number of pieces of each pipeline stage (interleaved schedule). null: one."""
    num_layers_in_first_pipeline_stage: PositiveInt | None
    """Number of layers in the first pipeline stage, if the stages cannot have equal numbers. null: as many as in a
    middle stage."""
    num_layers_in_last_pipeline_stage: PositiveInt | None
    """Number of layers in the last pipeline stage, not counting the output layer. null: as many as in a middle
    stage."""
    expert_model_parallel_size: PositiveInt
    """Number of ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt
    """Number of ranks that share each expert's matrices: 1, or the tensor parallel size."""
    context_parallel_size: PositiveInt
    """Number of ranks that share each sequence in equal parts. Above 1, this needs GPUs, Transformer Engine's
    attention, a model without attention windows and sinks, and a `generation.backend` other than megatron."""
    sequence_parallel: bool
    """Divide activations along the sequence between tensor-parallel ranks. Must be true if `tensor_model_parallel_size`
    is above 1, else false."""
    activation_checkpointing: ActivationCheckpointing
    """Which activations the backward pass recomputes to save memory. full (or true): of all layers. moe: of MoE layers.
    none (or false): of no layer."""
    model_overrides: dict[str, Any]
    """More fields of Megatron-Core's TransformerConfig. They may only change how the model is computed, such as
    `attention_backend: flash`. They override all other keys. {}: none."""
    env_vars: dict[str, str]
    """Environment variables of the workers, such as `NCCL_DEBUG: INFO`. {}: none."""
    distributed_timeout_minutes: Annotated[int, Field(gt=0, le=MOST_MINUTES)]
    """Number of minutes that ranks wait for each other in a collective before the run fails."""
    layer_spec: Literal["auto", "local"]
    """auto: Transformer Engine if installed, else this package's fast modules. local: Megatron-Core's unfused
    modules."""
    freeze_moe_router: bool
    """Do not train the routers' weights."""
    mtp_num_layers: PositiveInt | None
    """Train the model's layers of multi-token prediction (MTP). Must be the number that its config.json declares. null:
    do not train them. Exported weights then contain them unchanged."""
    mtp_loss_scaling_factor: Coefficient
    """Factor of the MTP layers' loss, the negative log-probability of the trained tokens that they predict."""
    mtp_detach_heads: bool
    """Whether the MTP layers' loss trains only these layers. false: it also trains the model, with its embedding and
    output layer."""
    track_moe_metrics: bool
    """Log MoE metrics under `moe/`."""
    moe_per_layer_logging: bool
    """Also log MoE metrics for each layer."""
    moe_metrics: MoeMetricsConfig
    """Load balance metrics."""
    log_moe_overload_factor: bool
    """Log the overload factor: the work of the busiest expert-parallel rank over the mean of all ranks."""
    router_gradients: RouterGradientsConfig
    """Measurement of the routers' gradient by source."""
    moe_router_force_hot_rank: NonNegativeInt | None
    """For benchmarks and drills only: send every token to the experts of this expert-parallel rank. null: off."""
    distributed_data_parallel_config: DistributedDataParallelConfig
    """Settings of data parallelism."""
    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig
    """The learning rate schedule."""

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one copy of the dense part of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class FreezeConfig(StrictModel):
    """Parts of a vision-language model whose weights are not trained."""

    vision_tower: bool
    """Whether the vision tower is frozen, without the projector."""
    projector: bool
    """Whether the projector is frozen, the layers that project the tower's output to the decoder's hidden size."""
    language_model: bool
    """Whether the decoder is frozen, with its embeddings, experts, routers and expert bias."""


BASE_OF_ADAPTERS = FreezeConfig(vision_tower=True, projector=True, language_model=True)
"""Frozen parts if adapters are trained."""


def sequence_multiple(context_parallel_size: int) -> int:
    """Return the multiple to which the length of a row or packed sequence is padded: twice the number of ranks that
    share the sequence, or 1 if one rank has it."""
    return 2 * context_parallel_size if context_parallel_size > 1 else 1


class PolicyConfig(StrictModel):
    """The model that is trained."""

    model_name: PathText
    """A folder with a Hugging Face `config.json`, or a name on the hub."""
    init: Literal["random", "pretrained"]
    """Initial weights. random: sampled with `init_seed`. pretrained: read from `model_name`."""
    init_seed: Seed
    """Seed of random initial weights."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    train_global_batch_size: PositiveInt
    """Number of samples in one optimizer step, over all ranks."""
    train_micro_batch_size: PositiveInt
    """Number of samples in one forward and backward pass on one data-parallel rank."""
    max_total_sequence_length: PositiveInt
    """Maximum number of tokens in a sample. Longer samples are truncated and counted."""
    logprob_chunk_size: PositiveInt | None
    """Maximum number of tokens whose logits are in memory at the same time. For a microbatch with more tokens, training
    recomputes the logits in the backward pass. null: all tokens of the microbatch."""
    precision: Literal["float32", "bfloat16"]
    """Number format of weights and activations. The optimizer keeps float32 master weights."""
    max_grad_norm: PositiveRatio | None
    """Clip the gradient to this norm. null: no clipping."""
    max_consecutive_skipped_updates: PositiveInt
    """The run stops if this many updates in a row are skipped because of a NaN or infinite loss or gradient."""
    sequence_packing: TokenBudgetConfig
    """Settings for putting several samples into one row, without padding between them."""
    dynamic_batching: DynamicBatchingConfig
    """Settings for putting samples of similar length into one microbatch, as many as fit."""
    shared_prefix: bool | Literal["auto"]
    """Compute the common prefix of sequences in a microbatch once, such as the prompt of several responses. Results are
    those of separate sequences. With routing replay, all responses to a prompt use the prompt's experts of the first
    response in the microbatch. auto: share if a batch then has at least a third fewer tokens. On CPUs only."""
    freeze: FreezeConfig
    """Parts that are not trained."""
    lora: LoraConfig | None
    """Train low-rank adapters on frozen weights. null: train the weights."""
    megatron_cfg: MegatronConfig
    """Layout and training of the model in Megatron-Core."""

    @property
    def frozen_parts(self) -> FreezeConfig:
        """Parts whose own weights are not trained."""
        return self.freeze if self.lora is None else BASE_OF_ADAPTERS


class RoleParallelConfig(StrictModel):
    """Parallel layout of a role: a model other than the policy, on separate workers."""

    tensor_model_parallel_size: PositiveInt
    """Number of ranks that share each matrix."""
    pipeline_model_parallel_size: PositiveInt
    """Number of pipeline stages. Each rank of a pipeline has the layers of one stage."""
    expert_model_parallel_size: PositiveInt
    """Number of ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt
    """Number of ranks that share each expert's matrices: 1, or the tensor parallel size."""
    sequence_parallel: bool
    """Divide activations along the sequence between tensor-parallel ranks. Must be true if `tensor_model_parallel_size`
    is above 1, else false."""


class RoleModelConfig(StrictModel):
    """A model other than the policy, such as a teacher. The model reads the policy's tokens. Settings that have no key
    in this section are the policy's."""

    model_name: PathText
    """A folder with a Hugging Face `config.json` and weights, or a name on the hub. Any supported architecture."""
    logprob_batch_size: PositiveInt
    """Number of samples in one log-probability pass on one rank. Packing and dynamic batching fill the pass by tokens
    instead."""
    megatron_cfg: RoleParallelConfig
    """Parallel layout."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the role's model as a `policy` section.

        The section omits the policy's routing settings (`moe_*`). The role's own `config.json` has them.
        """
        megatron = policy.megatron_cfg
        shared = {name: getattr(megatron, name) for name in type(megatron).model_fields if name not in MOE_FIELD_NAMES}
        alone: dict[str, Any] = {
            "context_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "model_overrides": {},
            "activation_checkpointing": "none",
            "mtp_num_layers": None,
            "track_moe_metrics": False,
            "moe_per_layer_logging": False,
            "log_moe_overload_factor": False,
            "moe_router_force_hot_rank": None,
        }
        layout = self.megatron_cfg.model_dump()
        common = {name: getattr(policy, name) for name in PolicyConfig.model_fields}
        return PolicyConfig.model_construct(
            **common
            | {
                "model_name": self.model_name,
                "init": "pretrained",
                "freeze": FreezeConfig(vision_tower=False, projector=False, language_model=False),
                "lora": None,
                "train_micro_batch_size": self.logprob_batch_size,
                "megatron_cfg": MegatronConfig.model_construct(**shared | alone | layout),
            }
        )


class FrozenRoleConfig(RoleModelConfig):
    """A model other than the policy that does not train."""

    adapter: PathText | None
    """Folder of an adapter that the model computes with: of peft, a run's `final` or a checkpoint. null: none."""


class TrainedRoleConfig(RoleModelConfig):
    """A model other than the policy that trains with it and has its own optimizer, such as a critic."""

    lr: LearningRate
    """Highest learning rate, reached at the end of the warm-up."""
    lr_warmup_iters: NonNegativeInt
    """Number of optimizer steps over which the learning rate rises linearly from 0. 0: no warm-up."""
    lora: LoraConfig | None
    """Train low-rank adapters on frozen weights, and all weights of a value head. null: train the weights."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the role's model as a `policy` section, with `logprob_batch_size` as its `train_micro_batch_size`."""
        of_policy, role = policy.megatron_cfg, super().as_policy(policy)
        own = {
            "activation_checkpointing": of_policy.activation_checkpointing,
            "optimizer": of_policy.optimizer.model_copy(update={"lr": self.lr, "min_lr": None}),
            "scheduler": of_policy.scheduler.model_copy(update={"lr_warmup_iters": self.lr_warmup_iters}),
        }
        megatron = role.megatron_cfg.model_copy(update=own)
        return role.model_copy(update={"lora": self.lora, "megatron_cfg": megatron})

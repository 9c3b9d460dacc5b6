# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `policy` section: the model, its batches, and its layout and optimizer in Megatron-Core."""

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES, MoeTransformerFields
from nemo_rl_moe.config.schema_base import (
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
    """A Jinja file that replaces the tokenizer's chat template. null: keep the tokenizer's template."""
    corrected_template: Literal["auto", "never"]
    """auto: use this package's template if the tokenizer's is known to lose parts of some conversations (DeepSeek,
    Mistral). never: use the tokenizer's. A `chat_template` file always wins."""


class TokenBudgetConfig(StrictModel):
    """Microbatches that are filled by tokens instead of by samples."""

    enabled: bool
    """Cut the global batch this way. `train_micro_batch_size` is then not used."""
    train_mb_tokens: PositiveInt
    """Most tokens in one microbatch."""
    train_mb_patches: PositiveInt | None
    """Most image patches that the vision tower encodes for one microbatch. Equal images count once, and a microbatch
    whose samples all have the same images may exceed it. null: `train_mb_tokens` is the only limit. Each image token
    has as many patches as the square of the tower's merge size."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Microbatches of sequences of similar length, divided further while that saves more padding than it costs."""

    microbatch_overhead_tokens: NonNegativeInt
    """Fixed cost of one more microbatch, in tokens that could be computed in the same time. A larger number gives fewer
    microbatches and more padding. 0: the least padding."""


class DistributedDataParallelConfig(StrictModel):
    """Megatron-Core's data parallelism."""

    use_distributed_optimizer: bool
    """Shard the optimizer's state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool
    """Gather weights during the next forward pass, between the updates of one step. After the last update of a step,
    all weights are gathered. Needs the two settings above."""
    bucket_size: PositiveInt | None
    """Number of parameters whose gradients are reduced, and whose weights are gathered, together. null: Megatron-Core's
    choice, 40 million or more with many ranks."""
    grad_reduce_in_fp32: bool
    """Accumulate and reduce gradients in float32."""


class OptimizerConfig(StrictModel):
    """Adam with decoupled weight decay."""

    lr: LearningRate
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: LowestLearningRate | None
    """Learning rate at the end of the decay, which the constant style does not have. null: a tenth of `lr`."""
    weight_decay: WeightDecay
    """Weight decay of matrices. Norms and biases have none."""
    adam_beta1: UnitFloat
    """Decay of Adam's first moment."""
    adam_beta2: UnitFloat
    """Decay of Adam's second moment."""
    adam_eps: AdamEpsilon
    """Adam's epsilon."""
    use_precision_aware_optimizer: bool
    """Use Transformer Engine's Adam on gradients in the format of their buffers, without float32 copies, and with
    moments in the formats below. With `optimizer_cpu_offload`, Transformer Engine is not needed."""
    exp_avg_dtype: Literal["float32", "bfloat16"]
    """Number format of the first moment. bfloat16 needs `use_precision_aware_optimizer`."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16"]
    """Number format of the second moment. bfloat16 needs `use_precision_aware_optimizer`."""
    optimizer_cpu_offload: bool
    """Keep master weights and moments in the host's memory, and update there. Needs `use_precision_aware_optimizer`."""
    optimizer_offload_fraction: Share
    """Share of a rank's parameters that `optimizer_cpu_offload` applies to, above 0 and at most 1."""
    overlap_cpu_optimizer_d2h_h2d: bool
    """With `optimizer_cpu_offload`, copy gradients to the host and weights back while other parameters are updated."""

    @property
    def end_lr(self) -> float:
        """Learning rate at the end of the decay: `min_lr`, or a tenth of `lr`."""
        # In decimal, as a user writes it: 3e-3 / 10 in binary is not 3e-4.
        return float(Decimal(repr(self.lr)) / 10) if self.min_lr is None else self.min_lr


class SchedulerConfig(StrictModel):
    """The learning rate over the optimizer's steps, counted from 1. Step `k` trains at `lr * k / lr_warmup_iters` until
    the end of the warm-up, and then on the decay at tick `k` of `lr_decay_iters`. Without a warm-up it trains at tick
    `k - 1`, so that the first step trains at `lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    """Shape of the decay from `lr` to `min_lr`."""
    lr_warmup_iters: NonNegativeInt
    """Steps of linear warm-up from 0. A shorter run ends within the warm-up. 0: no warm-up."""
    lr_decay_iters: PositiveInt | None
    """Step, warm-up included, at which `min_lr` is reached, or after which it is reached if there is no warm-up. Must
    exceed the warm-up. null: the number of steps of the run."""


class MoeMetricsConfig(StrictModel):
    """Load balance metrics, logged while `track_moe_metrics` is on."""

    mode: Literal["brief", "detailed"]
    """brief: at most 60 metrics, independent of the model's size. detailed: a few more for each layer."""
    top_k_experts: NonNegativeInt
    """Number of the most loaded and of the least loaded experts to log. 0: none."""
    detailed_every_steps: PositiveInt | None
    """In brief mode, log in detail on each step that is a multiple of this number. null: never."""
    what_if_expert_parallel_sizes: list[PositiveInt]
    """Expert parallel sizes whose overload factors are predicted from the same counts. []: none."""


class RouterGradientsConfig(StrictModel):
    """Gradient of the routers by source: the algorithm's loss, load balancing losses, z-loss. Each source costs a
    forward and backward pass over the measured microbatches. Training is unchanged, to the bit."""

    every_n_steps: PositiveInt | None
    """Measure on each step that is a multiple of this number. null: never."""
    num_microbatches: PositiveInt | None
    """Microbatches to measure on each data-parallel rank, from the first global batch of the step. An interleaved
    pipeline rounds to a multiple of its stages. null: all."""


class MegatronConfig(MoeTransformerFields):
    """Layout and training of the model in Megatron-Core. Any `moe_*` field of its `TransformerConfig` is a key too."""

    tensor_model_parallel_size: PositiveInt
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: PositiveInt
    """Ranks that share the layers, one stage each."""
    virtual_pipeline_model_parallel_size: PositiveInt | None
    """Pieces of each pipeline stage (interleaved schedule). null: one."""
    num_layers_in_first_pipeline_stage: PositiveInt | None
    """Layers of the first pipeline stage, if the layers do not divide evenly. null: as many as in a middle stage."""
    num_layers_in_last_pipeline_stage: PositiveInt | None
    """Layers of the last pipeline stage, which also has the output layer. null: as many as in a middle stage."""
    expert_model_parallel_size: PositiveInt
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt
    """Ranks that share each expert's matrices: 1, or the tensor parallel size."""
    context_parallel_size: PositiveInt
    """Ranks that share each sequence in equal parts. Above 1 it needs GPUs, Transformer Engine's attention, a model
    without attention windows and sinks, and a `generation.backend` other than megatron."""
    sequence_parallel: bool
    """Divide activations along the sequence between tensor-parallel ranks. True exactly with tensor parallelism."""
    activation_checkpointing: ActivationCheckpointing
    """Activations that the backward pass recomputes to save memory. full (or true): of all layers. moe: of the MoE
    layers. none (or false): none."""
    model_overrides: dict[str, Any]
    """More fields of Megatron-Core's TransformerConfig, which change only how a model is computed, such as
    `attention_backend: flash`. They override all other keys. {}: none."""
    env_vars: dict[str, str]
    """Environment variables of the workers, such as `NCCL_DEBUG: INFO`. {}: none."""
    distributed_timeout_minutes: Annotated[int, Field(gt=0, le=MOST_MINUTES)]
    """Minutes that ranks wait for each other in a collective before the run fails."""
    layer_spec: Literal["auto", "local"]
    """auto: Transformer Engine if installed, else this package's fast modules. local: Megatron-Core's unfused
    modules."""
    freeze_moe_router: bool
    """Do not train the routers' weights."""
    track_moe_metrics: bool
    """Log MoE metrics under `moe/`."""
    moe_per_layer_logging: bool
    """Also log MoE metrics for each layer."""
    moe_metrics: MoeMetricsConfig
    """Load balance metrics."""
    log_moe_overload_factor: bool
    """Log the work of the busiest expert-parallel rank over the mean of all ranks."""
    router_gradients: RouterGradientsConfig
    """Gradient of the routers by source."""
    moe_router_force_hot_rank: NonNegativeInt | None
    """For benchmarks and drills only: send every token to the experts of this expert-parallel rank. null: off."""
    distributed_data_parallel_config: DistributedDataParallelConfig
    """Data parallelism."""
    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig
    """The learning rate schedule."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense part of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


class FreezeConfig(StrictModel):
    """Parts of a vision-language model whose weights are not trained."""

    vision_tower: bool
    """The vision tower, without the projector."""
    projector: bool
    """The layers that project the tower's output to the decoder's hidden size."""
    language_model: bool
    """The decoder, with its embeddings, experts, routers and their expert bias."""


def sequence_multiple(context_parallel_size: int) -> int:
    """Return the multiple that a row or packed sequence is padded to: twice the number of ranks that share it."""
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
    """Samples of one optimizer step, over all ranks."""
    train_micro_batch_size: PositiveInt
    """Samples of one forward and backward pass on one data-parallel rank."""
    max_total_sequence_length: PositiveInt
    """Most tokens of a sample. Longer ones are truncated and counted."""
    logprob_chunk_size: PositiveInt | None
    """Number of tokens whose logits exist at the same time if a microbatch has more. Training then recomputes the
    logits in the backward pass. null: all tokens of the microbatch."""
    precision: Literal["float32", "bfloat16"]
    """Number format of weights and activations. The optimizer keeps float32 master weights."""
    max_grad_norm: PositiveRatio | None
    """Clip the gradient to this norm. null: no clipping."""
    max_consecutive_skipped_updates: PositiveInt
    """The run stops after this many updates in a row were skipped for a NaN or infinite loss or gradient."""
    sequence_packing: TokenBudgetConfig
    """Put several samples into one row, without padding between them."""
    dynamic_batching: DynamicBatchingConfig
    """Put samples of similar length into one microbatch, as many as fit."""
    freeze: FreezeConfig
    """Parts that are not trained."""
    lora: LoraConfig | None
    """Train low-rank adapters on frozen weights. null: train the weights."""
    megatron_cfg: MegatronConfig
    """Megatron-Core."""


class RoleParallelConfig(StrictModel):
    """Parallel layout of a model other than the policy, which has separate workers."""

    tensor_model_parallel_size: PositiveInt
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: PositiveInt
    """Ranks that share the layers, one stage each."""
    expert_model_parallel_size: PositiveInt
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt
    """Ranks that share each expert's matrices: 1, or the tensor parallel size."""
    sequence_parallel: bool
    """Divide activations along the sequence between tensor-parallel ranks. True exactly with tensor parallelism."""


class RoleModelConfig(StrictModel):
    """A model other than the policy, such as a teacher, that only runs forward passes. It reads the policy's tokens.
    All settings without a key here are the policy's."""

    model_name: PathText
    """A folder with a Hugging Face `config.json` and weights, or a name on the hub. Any supported architecture."""
    logprob_batch_size: PositiveInt
    """Samples of one log-probability pass on one rank. Packing and dynamic batching fill the pass by tokens instead."""
    megatron_cfg: RoleParallelConfig
    """Parallel layout."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the role's model as a `policy` section.

        It omits the policy's routing settings (`moe_*`), which come from the model's own `config.json`.
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


class TrainedRoleConfig(RoleModelConfig):
    """A model other than the policy that trains with it and has its own optimizer, such as a critic."""

    lr: LearningRate
    """Highest learning rate, reached at the end of the warm-up."""
    lr_warmup_iters: NonNegativeInt
    """Steps of linear warm-up from 0. 0: no warm-up."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the role's model as a `policy` section, with `logprob_batch_size` as its `train_micro_batch_size`."""
        of_policy, role = policy.megatron_cfg, super().as_policy(policy)
        own = {
            "activation_checkpointing": of_policy.activation_checkpointing,
            "optimizer": of_policy.optimizer.model_copy(update={"lr": self.lr, "min_lr": None}),
            "scheduler": of_policy.scheduler.model_copy(update={"lr_warmup_iters": self.lr_warmup_iters}),
        }
        return role.model_copy(update={"megatron_cfg": role.megatron_cfg.model_copy(update=own)})

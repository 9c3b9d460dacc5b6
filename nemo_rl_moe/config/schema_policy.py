# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `policy` section: the model, how its batches are cut, and how Megatron-Core runs and optimizes it."""

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
    StrictModel,
    UnitFloat,
)
from nemo_rl_moe.config.schema_lora import LoraConfig


def _recompute_from_bool(value: Any) -> Any:
    return {False: "none", True: "full"}[value] if isinstance(value, bool) else value


HIGHEST_LEARNING_RATE = 10
"""Beyond, a value is a slip of the keyboard: Adam moves each weight by about so much in a step."""
LearningRate = Annotated[float, Field(gt=0, le=HIGHEST_LEARNING_RATE)]
LowestLearningRate = Annotated[float, Field(ge=0, le=HIGHEST_LEARNING_RATE)]
WeightDecay = Annotated[float, Field(ge=0, le=10)]
AdamEpsilon = Annotated[float, Field(gt=0, le=1)]
MOST_MINUTES = 1_000_000
OffloadFraction = Annotated[float, Field(gt=0, le=1)]
ActivationCheckpointing = Annotated[Literal["none", "full", "moe"], BeforeValidator(_recompute_from_bool)]


class TokenizerConfig(StrictModel):
    """The tokenizer, read by `transformers.AutoTokenizer`."""

    name: PathText
    """A folder or a hub's name."""
    chat_template: PathText | None
    """A Jinja file that replaces the tokenizer's own chat template; null: its own."""
    corrected_template: Literal["auto", "never"]
    """Templates of ours in the place of the tokenizer's own, where that is known to lose a part of some
    conversations (DeepSeek's, Mistral's); a template of the user's own is never replaced."""


class TokenBudgetConfig(StrictModel):
    """A way to fill microbatches by tokens instead of by samples."""

    enabled: bool
    """Cut the global batch this way; then `train_micro_batch_size` is not used."""
    train_mb_tokens: PositiveInt
    """Most tokens that one microbatch may hold."""
    train_mb_patches: PositiveInt | None
    """Most patches of distinct images that the vision tower may run for one microbatch, unless its samples have the
    same images. null: as many as the tokens let in, which is the square of the tower's merge size times
    `train_mb_tokens` at most, as each image token is made of so many patches."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Microbatches of sequences of similar length, cut where the padding saved is worth one more of them."""

    microbatch_overhead_tokens: NonNegativeInt
    """Tokens that could be computed in the time that one more microbatch takes by itself. A larger number gives fewer
    microbatches and more padding; 0: the least padding."""


class DistributedDataParallelConfig(StrictModel):
    """Megatron-Core's data parallelism."""

    use_distributed_optimizer: bool
    """Shard the optimizer's state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool
    """Reduce gradients while the backward pass still runs."""
    overlap_param_gather: bool
    """Gather weights while the next forward pass already runs, between the updates of one step; all are there when its
    last update is done. Needs the two settings above."""
    bucket_size: PositiveInt | None
    """Parameters whose gradients are reduced, and weights gathered, at a time; null: Megatron-Core's choice, 40 million
    or more with many ranks."""
    grad_reduce_in_fp32: bool
    """Accumulate and reduce gradients in float32."""


class OptimizerConfig(StrictModel):
    """Adam with decoupled weight decay."""

    lr: LearningRate
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: LowestLearningRate | None
    """Learning rate at the end of the decay; null: a tenth of `lr`. With lr_decay_style constant there is no decay."""
    weight_decay: WeightDecay
    """Decay of matrices; norms and biases are not decayed."""
    adam_beta1: UnitFloat
    """Adam's first moment decay."""
    adam_beta2: UnitFloat
    """Adam's second moment decay."""
    adam_eps: AdamEpsilon
    """Adam's epsilon."""
    use_precision_aware_optimizer: bool
    """Transformer Engine's Adam, on gradients as the buffers have them and with moments in the formats below, without
    float32 copies of gradients. Beside it, `optimizer_cpu_offload`; that needs no Transformer Engine."""
    exp_avg_dtype: Literal["float32", "bfloat16"]
    """Number format of the first moment; bfloat16 needs `use_precision_aware_optimizer`."""
    exp_avg_sq_dtype: Literal["float32", "bfloat16"]
    """Number format of the second moment; bfloat16 needs `use_precision_aware_optimizer`."""
    optimizer_cpu_offload: bool
    """Keep masters and moments in the host's memory, and update there. Needs `use_precision_aware_optimizer`."""
    optimizer_offload_fraction: OffloadFraction
    """Share of a rank's parameters that `optimizer_cpu_offload` holds for; above 0, at most 1."""
    overlap_cpu_optimizer_d2h_h2d: bool
    """Copy gradients to the host and weights back while other parameters are updated there."""

    @property
    def end_lr(self) -> float:
        """Learning rate at the end of the decay: `min_lr`, or a tenth of `lr`."""
        # In decimal, as a user writes it: 3e-3 / 10 in binary is not 3e-4.
        return float(Decimal(repr(self.lr)) / 10) if self.min_lr is None else self.min_lr


class SchedulerConfig(StrictModel):
    """The learning rate over the optimizer's steps, counted from 1. Step `k` trains at `lr * k / lr_warmup_iters` up to
    the end of the warm-up, and then on the decay at tick `k` of `lr_decay_iters`. Without a warm-up it trains at tick
    `k - 1`, so that the first step trains at `lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"]
    """Shape of the decay from `lr` to `min_lr`."""
    lr_warmup_iters: NonNegativeInt
    """Steps of linear warm-up from 0; a run that ends before sees the beginning of it. 0: none."""
    lr_decay_iters: PositiveInt | None
    """Step, warm-up included, at which `min_lr` is reached; must exceed the warm-up; null: the run's number of steps.
    Without a warm-up `min_lr` is reached after that step."""


class MoeMetricsConfig(StrictModel):
    """Load balance metrics, logged while `track_moe_metrics` is on."""

    mode: Literal["brief", "detailed"]
    """brief: at most 60 keys whatever the model's size; detailed: a few more for each layer."""
    top_k_experts: NonNegativeInt
    """Number of the most and of the least loaded experts to log; 0: none."""
    detailed_every_steps: PositiveInt | None
    """In brief mode, log in detail on every so many steps; null: never."""
    what_if_expert_parallel_sizes: list[PositiveInt]
    """Expert parallel sizes whose overload factors are predicted from the same counts; []: none."""


class RouterGradientsConfig(StrictModel):
    """Gradient of the routers by source: the algorithm's loss, load balancing losses, z-loss. Each source costs a
    forward and backward pass over the measured microbatches; training itself is unchanged, to the bit."""

    every_n_steps: PositiveInt | None
    """Measure on every so many steps; null: never."""
    num_microbatches: PositiveInt | None
    """Number of microbatches to measure, from the step's first global batch, on each data-parallel rank; an interleaved
    pipeline runs a multiple of its stages. null: all."""


class MegatronConfig(MoeTransformerFields):
    """Layout and training of the model in Megatron-Core; any `moe_*` field of its `TransformerConfig` besides."""

    tensor_model_parallel_size: PositiveInt
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: PositiveInt
    """Ranks that share the layers, one stage each."""
    virtual_pipeline_model_parallel_size: PositiveInt | None
    """Pieces that each pipeline stage is cut into (interleaved schedule); null: one."""
    num_layers_in_first_pipeline_stage: PositiveInt | None
    """Layers of the first stage, where the model's cannot be dealt out evenly; null: as many as the stages between."""
    num_layers_in_last_pipeline_stage: PositiveInt | None
    """Layers of the last stage, which has the output layer too; null: as many as the stages between."""
    expert_model_parallel_size: PositiveInt
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt
    """Ranks that share each expert's matrices: 1, or the tensor parallel size."""
    context_parallel_size: PositiveInt
    """Ranks that share each sequence in equal parts; above 1 on GPUs alone, with Transformer Engine's attention, for
    models without attention windows and sinks, and not with `generation.backend: megatron`."""
    sequence_parallel: bool
    """Share activations between the tensor-parallel ranks along the sequence; goes with tensor parallelism."""
    activation_checkpointing: ActivationCheckpointing
    """Activations that the backward pass recomputes to save memory: none (none, false), those of all layers (full,
    true) or of the MoE layers (moe)."""
    model_overrides: dict[str, Any]
    """Fields of Megatron-Core's TransformerConfig that have no key here and change only how a model is computed, such
    as `attention_backend: flash`. They come last; {}: none."""
    env_vars: dict[str, str]
    """Environment variables of the workers, such as `NCCL_DEBUG: INFO`; {}: none."""
    distributed_timeout_minutes: Annotated[int, Field(gt=0, le=MOST_MINUTES)]
    """Minutes that ranks wait for each other in a collective, before the run fails."""
    layer_spec: Literal["auto", "local"]
    """auto: Transformer Engine where it is installed, otherwise this project's fast modules; local: Megatron-Core's own
    unfused modules."""
    freeze_moe_router: bool
    """Leave the routers' weights as they are."""
    track_moe_metrics: bool
    """Log MoE metrics under `moe/`."""
    moe_per_layer_logging: bool
    """Log MoE metrics for each layer too."""
    moe_metrics: MoeMetricsConfig
    """Load balance metrics."""
    log_moe_overload_factor: bool
    """Log how much more work the busiest expert-parallel rank has than the mean one."""
    router_gradients: RouterGradientsConfig
    """Gradient of the routers by source."""
    moe_router_force_hot_rank: NonNegativeInt | None
    """For benchmarks and drills only: send every token to the experts of this expert-parallel rank; null: no."""
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
    """Parts of a vision-language model whose weights stay as they are."""

    vision_tower: bool
    """The vision tower, without the projector."""
    projector: bool
    """The layers that bring the tower's output to the decoder's size."""
    language_model: bool
    """The decoder, with its embeddings, routers (their expert bias, too) and experts."""


def sequence_multiple(context_parallel_size: int) -> int:
    """Return the multiple that a row or packed sequence is padded to: twice the number of ranks that share it."""
    return 2 * context_parallel_size if context_parallel_size > 1 else 1


class PolicyConfig(StrictModel):
    """The model that is trained."""

    model_name: PathText
    """A folder with a Hugging Face `config.json`, or a hub's name."""
    init: Literal["random", "pretrained"]
    """Start from random weights, or from the model's own."""
    init_seed: Seed
    """Seed of random weights."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    train_global_batch_size: PositiveInt
    """Samples of one optimizer step, over all ranks."""
    train_micro_batch_size: PositiveInt
    """Samples of one forward and backward pass on one data-parallel rank."""
    max_total_sequence_length: PositiveInt
    """Most tokens of a sample; longer ones are truncated and counted."""
    logprob_chunk_size: PositiveInt | None
    """Tokens whose logits exist at a time, where a microbatch has more: training then recomputes them in the backward
    pass. null: the whole microbatch."""
    precision: Literal["float32", "bfloat16"]
    """Number format of weights and activations; the optimizer keeps float32 masters."""
    max_grad_norm: PositiveRatio | None
    """Clip the gradient to this norm; null: no clipping."""
    max_consecutive_skipped_updates: PositiveInt
    """Updates in a row that are skipped because the loss or the gradient is NaN or infinite, after which the run
    stops."""
    sequence_packing: TokenBudgetConfig
    """Put several samples into one row, without padding between them."""
    dynamic_batching: DynamicBatchingConfig
    """Put samples of similar length together, as many as fit."""
    freeze: FreezeConfig
    """Parts that are not trained."""
    lora: LoraConfig | None
    """Train low-rank adapters beside frozen weights; null: train the weights."""
    megatron_cfg: MegatronConfig
    """Megatron-Core."""


class RoleParallelConfig(StrictModel):
    """Parallel layout of a model beside the policy, in workers of its own."""

    tensor_model_parallel_size: PositiveInt
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: PositiveInt
    """Ranks that share the layers, one stage each."""
    expert_model_parallel_size: PositiveInt
    """Ranks that share the experts of a layer."""
    expert_tensor_parallel_size: PositiveInt
    """Ranks that share each expert's matrices: 1, or the tensor parallel size."""
    sequence_parallel: bool
    """Share activations between the tensor-parallel ranks along the sequence; goes with tensor parallelism."""


class RoleModelConfig(StrictModel):
    """A model beside the policy that runs forward passes alone, such as a teacher. It reads the policy's tokens; what
    is not said here is as in `policy`."""

    model_name: PathText
    """A folder with a Hugging Face `config.json` and weights, or a hub's name. Any supported architecture."""
    logprob_batch_size: PositiveInt
    """Samples of one log-probability pass on one rank; packing and dynamic batching fill it by tokens instead."""
    megatron_cfg: RoleParallelConfig
    """Parallel layout."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the role's model as a `policy` section.

        The policy's routing settings (`moe_*`) are left out: the model's own `config.json` has them.
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
    """A model beside the policy that trains with it, such as a critic, with an optimizer of its own."""

    lr: LearningRate
    """Highest learning rate, reached at the end of the warm-up."""
    lr_warmup_iters: NonNegativeInt
    """Steps of linear warm-up from 0; 0: none."""

    def as_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the role's model as a `policy` section; `logprob_batch_size` is its `train_micro_batch_size` too."""
        of_policy, role = policy.megatron_cfg, super().as_policy(policy)
        own = {
            "activation_checkpointing": of_policy.activation_checkpointing,
            "optimizer": of_policy.optimizer.model_copy(update={"lr": self.lr, "min_lr": None}),
            "scheduler": of_policy.scheduler.model_copy(update={"lr_warmup_iters": self.lr_warmup_iters}),
        }
        return role.model_copy(update={"megatron_cfg": role.megatron_cfg.model_copy(update=own)})

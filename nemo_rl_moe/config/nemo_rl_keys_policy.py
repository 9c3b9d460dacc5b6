# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's keys of the model, of PyTorch's engine and of Megatron-Core, each with its counterpart here."""

from typing import Any

from nemo_rl_moe.config.nemo_rl_row import ENGINE, Row, no_counterpart, same_names
from nemo_rl_moe.config.nemo_rl_translation import MEGATRON

_AUTOMODEL_FREEZE = "policy.dtensor_cfg.automodel_kwargs.freeze_config"


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


_MOE_FIELDS = (
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_permute_fusion",
    "moe_token_dispatcher_type",
    "moe_enable_deepep",
    "moe_shared_expert_overlap",
    "moe_grouped_gemm",
    "moe_expert_capacity_factor",
)

POLICY_ROWS: tuple[Row, ...] = (
    # The model.
    *same_names(
        "policy", "model_name", "train_global_batch_size", "train_micro_batch_size", "max_total_sequence_length"
    ),
    *same_names("policy", "max_grad_norm", "logprob_batch_size", "precision"),
    Row(
        "policy.offload_optimizer_for_logprob",
        "policy.offload_optimizer_for_logprob",
        "GRPO; before generation theirs always moves it where engines share GPUs, ours by"
        " `policy.offload_optimizer_for_generation`",
    ),
    Row("policy.tokenizer.name", "policy.tokenizer.name"),
    Row(
        "policy.tokenizer.chat_template",
        "policy.tokenizer.chat_template",
        "a file; a template in the YAML has to be written into one",
        None,
    ),
    Row("policy.tokenizer.chat_template_kwargs", "data.chat_template_kwargs", "", _empty_if_null),
    Row("policy.tokenizer.chat_template_kwargs.*", "data.chat_template_kwargs", "the same names", None),
    *no_counterpart("policy.tokenizer", "no video", "video.*"),
    *no_counterpart("policy.tokenizer", ENGINE, "use_fastokens"),
    *no_counterpart("policy.hf_config_overrides", "edit the model's config.json", "*"),
    *no_counterpart("policy", "of their Hugging Face backend", "generation_batch_size", off=32),
    *no_counterpart("policy", "the model's own config.json says so", "is_vlm", off=True),
    *no_counterpart(
        "policy",
        "no quantization",
        "quant_cfg",
        "quant_calib_data",
        "quant_calib_size",
        "quant_batch_size",
        "quant_sequence_length",
        "disable_modelopt_layer_spec",
    ),
    *no_counterpart("policy", "weights are read as they are: dequantize them before", "dequantize_base_checkpoint"),
    *no_counterpart("policy", "`policy.generation.weight_transport`", "refit_buffer_size_gb"),
    *no_counterpart("policy.sequence_packing", ENGINE, "fuse_loss"),
    Row("policy.logprob_chunk_size", "policy.logprob_chunk_size", "of training too; null: the default here", None),
    *no_counterpart("policy", "padded as the layout needs it", "make_sequence_length_divisible_by", off=1),
    *no_counterpart("policy.draft", "no draft models", "*"),
    Row(
        "policy.router_replay.enabled",
        f"{MEGATRON}.routing_replay",
        "true is `rollout`",
        lambda value: "rollout" if value else "none",
    ),
    Row("policy.dynamic_batching.enabled", "policy.dynamic_batching.enabled"),
    Row("policy.dynamic_batching.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens"),
    Row("policy.sequence_packing.enabled", "policy.sequence_packing.enabled"),
    Row("policy.sequence_packing.train_mb_tokens", "policy.sequence_packing.train_mb_tokens"),
    *no_counterpart("policy.dynamic_batching", "log-probability passes take `train_mb_tokens`", "logprob_mb_tokens"),
    *no_counterpart("policy.sequence_packing", "log-probability passes take `train_mb_tokens`", "logprob_mb_tokens"),
    *no_counterpart("policy.dynamic_batching", "padded as the layout needs it", "sequence_length_round", off=64),
    *no_counterpart(
        "policy.sequence_packing",
        "one way of packing",
        "sequence_length_round",
        "algorithm",
        "microbatch_order",
        off=64,
    ),
    # Parts of a model with a vision tower, of the engine that is on.
    Row(f"{MEGATRON}.freeze_config.freeze_vision_model", "policy.freeze.vision_tower"),
    Row(f"{MEGATRON}.freeze_config.freeze_vision_projection", "policy.freeze.projector"),
    Row(f"{MEGATRON}.freeze_config.freeze_language_model", "policy.freeze.language_model"),
    Row(f"{_AUTOMODEL_FREEZE}.freeze_vision_tower", "policy.freeze.vision_tower"),
    Row(f"{_AUTOMODEL_FREEZE}.freeze_language_model", "policy.freeze.language_model"),
    *no_counterpart(_AUTOMODEL_FREEZE, "no sound", "freeze_audio_tower"),
    # PyTorch's engine, where it is the one that is on.
    Row("policy.dtensor_cfg.enabled", MEGATRON, "Megatron-Core trains, whichever engine is on there", None),
    Row(f"{MEGATRON}.enabled", MEGATRON, "as above", None),
    Row("policy.dtensor_cfg.tensor_parallel_size", f"{MEGATRON}.tensor_model_parallel_size", "", None),
    Row("policy.dtensor_cfg.expert_parallel_size", f"{MEGATRON}.expert_model_parallel_size", "", None),
    Row("policy.dtensor_cfg.context_parallel_size", f"{MEGATRON}.context_parallel_size", "", None),
    Row("policy.dtensor_cfg.sequence_parallel", f"{MEGATRON}.sequence_parallel", "goes with tensor parallelism", None),
    Row("policy.dtensor_cfg.env_vars", f"{MEGATRON}.env_vars", "where that engine is on", None),
    Row("policy.dtensor_cfg.env_vars.*", f"{MEGATRON}.env_vars", "the same names", None),
    Row("policy.dtensor_cfg.activation_checkpointing", f"{MEGATRON}.activation_checkpointing", "", None),
    *no_counterpart("policy.dtensor_cfg.lora_cfg", "no LoRA", "*"),
    *no_counterpart("policy.dtensor_cfg", ENGINE, "*"),
    Row("policy.optimizer.name", f"{MEGATRON}.optimizer", "Adam with decoupled weight decay", None),
    *(
        Row(f"policy.optimizer.kwargs.{theirs}", f"{MEGATRON}.optimizer.{ours}", "", None)
        for theirs, ours in (
            ("lr", "lr"),
            ("weight_decay", "weight_decay"),
            ("betas", "adam_beta1"),
            ("eps", "adam_eps"),
        )
    ),
    *no_counterpart("policy.optimizer", ENGINE, "*"),
    Row(
        "policy.scheduler",
        f"{MEGATRON}.scheduler",
        "a warm-up (LinearLR), then ConstantLR, LinearLR or CosineAnnealingLR; ours begins at 0",
        None,
    ),
    # Megatron-Core.
    *same_names(
        MEGATRON,
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "context_parallel_size",
        "freeze_moe_router",
        "moe_per_layer_logging",
        *_MOE_FIELDS,
    ),
    Row(f"{MEGATRON}.env_vars", f"{MEGATRON}.env_vars", "null: none", None),
    Row(f"{MEGATRON}.env_vars.*", f"{MEGATRON}.env_vars", "the same names", None),
    *no_counterpart(MEGATRON, "fields of their provider; ours are TransformerConfig's", "model_overrides.*"),
    Row(f"{MEGATRON}.sequence_parallel", f"{MEGATRON}.sequence_parallel", "goes with tensor parallelism", None),
    Row(
        f"{MEGATRON}.activation_checkpointing",
        f"{MEGATRON}.activation_checkpointing",
        "none, full, or of the MoE layers alone (`recompute_granularity: selective`, `recompute_modules: [moe]`)",
        None,
    ),
    Row(f"{MEGATRON}.recompute_granularity", f"{MEGATRON}.activation_checkpointing", "see there", None),
    Row(f"{MEGATRON}.recompute_modules", f"{MEGATRON}.activation_checkpointing", "see there", None),
    Row(f"{MEGATRON}.optimizer.optimizer", f"{MEGATRON}.optimizer", "Adam with decoupled weight decay", None),
    *same_names(f"{MEGATRON}.optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    *same_names(f"{MEGATRON}.optimizer", "use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *same_names(f"{MEGATRON}.optimizer", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
    Row(
        f"{MEGATRON}.optimizer.optimizer_offload_fraction",
        f"{MEGATRON}.optimizer.optimizer_offload_fraction",
        "theirs may be 0: nothing is offloaded; ours is above 0",
        lambda value: value or 1.0,
    ),
    Row(
        f"{MEGATRON}.optimizer.use_distributed_optimizer",
        f"{MEGATRON}.distributed_data_parallel_config.use_distributed_optimizer",
    ),
    *no_counterpart(f"{MEGATRON}.optimizer", "is `policy.max_grad_norm`", "clip_grad"),
    *no_counterpart(
        f"{MEGATRON}.optimizer", "the optimizer keeps float32 masters; `policy.precision`", "*", off="float32"
    ),
    *same_names(f"{MEGATRON}.scheduler", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters"),
    Row(f"{MEGATRON}.scheduler.lr_warmup_init", f"{MEGATRON}.scheduler.lr_warmup_iters", "begins at 0", None),
    *no_counterpart(
        f"{MEGATRON}.scheduler",
        "the weight decay is constant: `optimizer.weight_decay`",
        "start_weight_decay",
        "end_weight_decay",
        "weight_decay_incr_style",
        off="constant",
    ),
    *same_names(f"{MEGATRON}.distributed_data_parallel_config", "grad_reduce_in_fp32", "overlap_grad_reduce"),
    *no_counterpart(f"{MEGATRON}.distributed_data_parallel_config", ENGINE, "*"),
    *no_counterpart(f"{MEGATRON}.peft", "no LoRA", "*"),
    *no_counterpart(f"{MEGATRON}.fp8_cfg", "no FP8", "*"),
    *no_counterpart(MEGATRON, "no multi-token prediction", "mtp_num_layers", "mtp_loss_scaling_factor"),
    *no_counterpart(MEGATRON, "no multi-token prediction", "mtp_use_repeated_layer", "mtp_detach_heads"),
    *no_counterpart(MEGATRON, ENGINE, "*", off="none"),
)

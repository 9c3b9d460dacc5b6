# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of NeMo-RL's configurations for SFT, DPO and GRPO, each with its counterpart here.

One table, which the translator (`nemo_rl.py`) and the page of migration are made from. Keys are those of NeMo-RL's
repository of 2026-08-22.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A key of NeMo-RL, or all keys of a section (`section.*`), and its counterpart.

    Attributes:
        theirs: Full key.
        ours: Full key here; None: there is none.
        note: What differs; of a key without a counterpart, why there is none.
        convert: Their value to ours; None: a rule sets ours, from several keys.
        off: Their value that asks for nothing, where that is not null, false, zero or empty.
    """

    theirs: str
    ours: str | None
    note: str = ""
    convert: Callable[[Any], Any] | None = lambda value: value
    off: Any = None


def _or_never(period: Any) -> Any:
    """A period of validation; below 0 there, 0 here is never."""
    return max(period, 0)


def _same(section: str, *names: str) -> tuple[Row, ...]:
    return tuple(Row(f"{section}.{name}", f"{section}.{name}") for name in names)


def _none(section: str, note: str, *names: str, off: Any = None) -> tuple[Row, ...]:
    return tuple(Row(f"{section}.{name}", None, note, off=off) for name in names)


def metric_name(name: Any) -> Any:
    """Name of the metric that chooses checkpoints: every loss of validation is `val:loss` here."""
    is_loss = isinstance(name, str) and name.startswith("val:") and name.endswith("_loss")
    return "val:loss" if is_loss else name


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


_ENGINE = "a setting of their engine or kernels"
_LOOP = ("max_num_epochs", "max_num_steps", "val_at_start", "val_at_end", "seed")
_BATCHES = "validation takes batches of `policy.train_global_batch_size`: `val_batches` counts as many samples"
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
_MEGATRON = "policy.megatron_cfg"
_VLLM = "policy.generation.vllm_cfg"

ROWS: tuple[Row, ...] = (
    # The loops.
    *(row for section in ("sft", "dpo", "grpo") for row in _same(section, *_LOOP)),
    *(
        Row(f"{section}.val_period", f"{section}.val_period", "below 0 is 0: never", _or_never)
        for section in ("sft", "dpo", "grpo")
    ),
    *(
        row
        for section in ("sft", "dpo")
        for row in (
            Row(f"{section}.val_batches", f"{section}.val_batches", _BATCHES, None),
            Row(f"{section}.val_global_batch_size", f"{section}.val_batches", _BATCHES, None),
            Row(f"{section}.val_micro_batch_size", None, "validation takes `policy.train_micro_batch_size`", off=1),
        )
    ),
    *_none("sft", "every assistant turn is trained on", "only_unmask_final"),
    *_same(
        "dpo",
        "reference_policy_kl_penalty",
        "preference_average_log_probs",
        "sft_average_log_probs",
        "preference_loss_weight",
        "sft_loss_weight",
    ),
    *_same(
        "grpo",
        "num_prompts_per_step",
        "num_generations_per_prompt",
        "use_dynamic_sampling",
        "dynamic_sampling_max_gen_batches",
        "overlong_filtering",
        "advantage_clip_low",
        "advantage_clip_high",
        "max_val_samples",
    ),
    Row("grpo.val_num_generations_per_prompt", "grpo.val_num_generations"),
    Row("grpo.normalize_rewards", "grpo.adv_estimator.normalize_rewards", "`grpo.adv_estimator`'s wins", None),
    Row("grpo.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline", "as above", None),
    Row(
        "grpo.adv_estimator.name",
        "grpo.adv_estimator.name",
        "`reinforce_plus_plus` with `minus_baseline` is `reinforce_plus_plus_baseline`; `raw_reward` is `reinforce`, or"
        " normalised `reinforce_plus_plus`. REINFORCE++ counts each response once, theirs each token; `gdpo` is"
        " here too, for rewards with names: the translation says what to write; `gae` and `opd` have no counterpart",
        None,
    ),
    Row(
        "grpo.adv_estimator.normalize_rewards",
        "grpo.adv_estimator.normalize_rewards",
        "with a leave-one-out baseline their standard deviation leaves the response out too, ours is the whole group's",
        None,
    ),
    Row("grpo.adv_estimator.use_leave_one_out_baseline", "grpo.adv_estimator.use_leave_one_out_baseline", "", None),
    Row("grpo.adv_estimator.minus_baseline", "grpo.adv_estimator.name", "see there", None),
    Row("grpo.adv_estimator.normalize_advantages", "grpo.adv_estimator.name", "of `raw_reward`: see there", None),
    Row(
        "grpo.adv_estimator.reward_weights",
        "env.reward_weights",
        "by place there, by name here; the translation of `gdpo` says what to write",
        None,
    ),
    *_none("grpo.adv_estimator", "of estimators without a counterpart", "*"),
    Row("grpo.reward_shaping.enabled", "grpo.reward_shaping.enabled"),
    Row("grpo.reward_shaping.overlong_buffer_length", "grpo.reward_shaping.overlong_buffer_length", "", None),
    Row(
        "grpo.reward_shaping.overlong_buffer_penalty",
        "grpo.reward_shaping.overlong_buffer_penalty",
        "ours ends at the whole penalty; theirs goes on beyond `max_response_length`",
        None,
    ),
    Row(
        "grpo.reward_shaping.max_response_length",
        "policy.generation.max_new_tokens",
        "the buffer ends where a response has to",
        None,
    ),
    *_none("grpo.reward_shaping", "no such punishment", "stop_properly_penalty_coef"),
    *_none(
        "grpo.reward_scaling",
        "rewards are taken as the environment gives them: a linear map changes nothing where advantages are normalised,"
        " but for the size of the overlong penalty beside it",
        "*",
    ),
    *_none("grpo", "a round of dynamic sampling generates `num_prompts_per_step` prompts", "batch_multiplier", off=1),
    *_none("grpo", "several turns are a coroutine of yours: `env.rollout`", "max_rollout_turns", off=1),
    *_none("grpo", "validation is one round of `policy.generation.max_batch_size` sequences a rank", "val_batch_size"),
    *_none("grpo", "validation is periodic from the start", "val_start_at", off=-1),
    *_none("grpo", "a run ends by steps or epochs", "stop_at_validation_metric", "stop_at_validation_threshold"),
    *_none(
        "grpo",
        "`loss_fn.importance_sampling_correction: sequence_mask` leaves out responses that training disagrees with",
        "seq_logprob_error_threshold",
    ),
    *_none("grpo", "without a divergence no reference model is run", "skip_reference_policy_logprobs_calculation"),
    *_none("grpo", "`grpo.use_dynamic_sampling` draws other prompts instead", "zero_variance_prompt_filtering"),
    *_none("grpo", "text alone", "debug_payload_metrics", "deduplicate_multimodal_data"),
    *_none("grpo", "no tools", "invalid_tool_call_advantage", "malformed_thinking_advantage"),
    *_none("grpo.async_grpo", "rollouts and training take turns", "*"),
    *_none("async_rl", "rollouts and training take turns", "*"),
    *_none("reward_penalties", "write them into the reward: `env.name: callable`", "*"),
    # The loss of GRPO.
    *_same(
        "loss_fn",
        "reference_policy_kl_penalty",
        "kl_output_clamp_value",
        "ratio_clip_min",
        "ratio_clip_max",
        "ratio_clip_c",
        "sequence_level_importance_ratios",
        "token_level_loss",
    ),
    Row(
        "loss_fn.reference_policy_kl_type",
        "loss_fn.reference_policy_kl_type",
        "in the reward only k1, as the others do not lead to a smaller divergence there",
        None,
    ),
    *_none("loss_fn", "the logarithm of a ratio is bounded by 20 in every estimate", "kl_input_clamp_value", off=20.0),
    Row(
        "loss_fn.use_on_policy_kl_approximation",
        "loss_fn.reference_policy_kl_gradient",
        "always `divergence`: theirs has the score function's part of the gradient too. Ours weighs a token by the"
        " policy over that before the step, theirs by 1 or, with this key, by the policy over the engine's; and the"
        " divergence gets the importance-sampling weight of its token here",
        None,
    ),
    Row(
        "loss_fn.use_kl_in_reward",
        "loss_fn.use_kl_in_reward",
        "of the whole response, before advantages, with every estimator; theirs of each token, with REINFORCE++ alone",
        None,
    ),
    Row(
        "loss_fn.use_importance_sampling_correction",
        "loss_fn.importance_sampling_correction",
        "without a type: `truncated` at a bound that nothing reaches",
        None,
    ),
    Row(
        "loss_fn.truncated_importance_sampling_type",
        "loss_fn.importance_sampling_correction",
        "`tis` is `truncated`, `icepop` the same, `seq-mask-tis` is `sequence_mask`; with"
        " `sequence_level_importance_ratios` the weights are of whole responses too: `importance_sampling_level`",
        None,
    ),
    Row(
        "loss_fn.truncated_importance_sampling_ratio", "loss_fn.importance_sampling_ratio_max", "where it is read", None
    ),
    Row(
        "loss_fn.truncated_importance_sampling_ratio_min",
        "loss_fn.importance_sampling_ratio_min",
        "where it is read",
        None,
    ),
    Row(
        "loss_fn.force_on_policy_ratio",
        "loss_fn.force_on_policy_ratio",
        "true is `always`; false is `auto`, which saves a pass where a step is one update: the ratio is 1 anyway",
        lambda value: "always" if value else "auto",
    ),
    Row("loss_fn.use_cispo", "loss_fn.objective", "`cispo`", None),
    Row("loss_fn.disable_ppo_ratio", "loss_fn.objective", "`reinforce`", None),
    *_none("loss_fn", "no such term", "positive_example_nll_weight"),
    # Checkpoints.
    *_same(
        "checkpointing",
        "enabled",
        "checkpoint_dir",
        "higher_is_better",
        "keep_top_k",
        "save_period",
        "checkpoint_must_save_by",
        "save_optimizer",
    ),
    Row("checkpointing.metric_name", "checkpointing.metric_name", "losses of validation are `val:loss`", metric_name),
    *_none(
        "checkpointing",
        "checkpoints are Megatron-Core's, the final weights a Hugging Face folder; `convert` makes the others",
        "model_save_format",
        "save_consolidated",
        "pretrained_checkpoint.*",
    ),
    # The model.
    *_same("policy", "model_name", "train_global_batch_size", "train_micro_batch_size", "max_total_sequence_length"),
    *_same("policy", "max_grad_norm", "logprob_batch_size", "precision"),
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
    *_none("policy.tokenizer", "text alone", "video.*"),
    *_none("policy.tokenizer", _ENGINE, "use_fastokens"),
    *_none("policy.hf_config_overrides", "edit the model's config.json", "*"),
    *_none("policy", "of their Hugging Face backend", "generation_batch_size", off=32),
    *_none("policy", "text alone", "is_vlm"),
    *_none(
        "policy",
        "no quantization",
        "quant_cfg",
        "quant_calib_data",
        "quant_calib_size",
        "quant_batch_size",
        "quant_sequence_length",
        "disable_modelopt_layer_spec",
    ),
    *_none("policy", "weights are read as they are: dequantize them before", "dequantize_base_checkpoint"),
    *_none("policy", "`policy.generation.weight_transport`", "refit_buffer_size_gb"),
    *_none("policy.sequence_packing", _ENGINE, "fuse_loss"),
    Row("policy.logprob_chunk_size", "policy.logprob_chunk_size", "of training too; null: the default here", None),
    *_none("policy", "padded as the layout needs it", "make_sequence_length_divisible_by", off=1),
    *_none("policy.draft", "no draft models", "*"),
    Row(
        "policy.router_replay.enabled",
        f"{_MEGATRON}.routing_replay",
        "true is `rollout`",
        lambda value: "rollout" if value else "none",
    ),
    Row("policy.dynamic_batching.enabled", "policy.dynamic_batching.enabled"),
    Row("policy.dynamic_batching.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens"),
    Row("policy.sequence_packing.enabled", "policy.sequence_packing.enabled"),
    Row("policy.sequence_packing.train_mb_tokens", "policy.sequence_packing.train_mb_tokens"),
    *_none("policy.dynamic_batching", "log-probability passes take `train_mb_tokens`", "logprob_mb_tokens"),
    *_none("policy.sequence_packing", "log-probability passes take `train_mb_tokens`", "logprob_mb_tokens"),
    *_none("policy.dynamic_batching", "padded as the layout needs it", "sequence_length_round", off=64),
    *_none(
        "policy.sequence_packing",
        "one way of packing",
        "sequence_length_round",
        "algorithm",
        "microbatch_order",
        off=64,
    ),
    # PyTorch's engine, where it is the one that is on.
    Row("policy.dtensor_cfg.enabled", _MEGATRON, "Megatron-Core trains, whichever engine is on there", None),
    Row(f"{_MEGATRON}.enabled", _MEGATRON, "as above", None),
    Row("policy.dtensor_cfg.tensor_parallel_size", f"{_MEGATRON}.tensor_model_parallel_size", "", None),
    Row("policy.dtensor_cfg.expert_parallel_size", f"{_MEGATRON}.expert_model_parallel_size", "", None),
    Row("policy.dtensor_cfg.context_parallel_size", f"{_MEGATRON}.context_parallel_size", "only 1", None),
    Row("policy.dtensor_cfg.sequence_parallel", f"{_MEGATRON}.sequence_parallel", "goes with tensor parallelism", None),
    Row("policy.dtensor_cfg.env_vars", f"{_MEGATRON}.env_vars", "where that engine is on", None),
    Row("policy.dtensor_cfg.env_vars.*", f"{_MEGATRON}.env_vars", "the same names", None),
    Row("policy.dtensor_cfg.activation_checkpointing", f"{_MEGATRON}.activation_checkpointing", "", None),
    *_none("policy.dtensor_cfg.lora_cfg", "no LoRA", "*"),
    *_none("policy.dtensor_cfg", _ENGINE, "*"),
    Row("policy.optimizer.name", f"{_MEGATRON}.optimizer", "Adam with decoupled weight decay", None),
    *(
        Row(f"policy.optimizer.kwargs.{theirs}", f"{_MEGATRON}.optimizer.{ours}", "", None)
        for theirs, ours in (
            ("lr", "lr"),
            ("weight_decay", "weight_decay"),
            ("betas", "adam_beta1"),
            ("eps", "adam_eps"),
        )
    ),
    *_none("policy.optimizer", _ENGINE, "*"),
    Row(
        "policy.scheduler",
        f"{_MEGATRON}.scheduler",
        "a warm-up (LinearLR), then ConstantLR, LinearLR or CosineAnnealingLR; ours begins at 0",
        None,
    ),
    # Megatron-Core.
    *_same(
        _MEGATRON,
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "freeze_moe_router",
        "moe_per_layer_logging",
        *_MOE_FIELDS,
    ),
    Row(f"{_MEGATRON}.context_parallel_size", f"{_MEGATRON}.context_parallel_size", "only 1", None),
    Row(f"{_MEGATRON}.env_vars", f"{_MEGATRON}.env_vars", "null: none", None),
    Row(f"{_MEGATRON}.env_vars.*", f"{_MEGATRON}.env_vars", "the same names", None),
    *_none(_MEGATRON, "fields of their provider; ours are TransformerConfig's", "model_overrides.*"),
    Row(f"{_MEGATRON}.sequence_parallel", f"{_MEGATRON}.sequence_parallel", "goes with tensor parallelism", None),
    Row(
        f"{_MEGATRON}.activation_checkpointing",
        f"{_MEGATRON}.activation_checkpointing",
        "none, full, or of the MoE layers alone (`recompute_granularity: selective`, `recompute_modules: [moe]`)",
        None,
    ),
    Row(f"{_MEGATRON}.recompute_granularity", f"{_MEGATRON}.activation_checkpointing", "see there", None),
    Row(f"{_MEGATRON}.recompute_modules", f"{_MEGATRON}.activation_checkpointing", "see there", None),
    Row(f"{_MEGATRON}.optimizer.optimizer", f"{_MEGATRON}.optimizer", "Adam with decoupled weight decay", None),
    *_same(f"{_MEGATRON}.optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    *_same(f"{_MEGATRON}.optimizer", "use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *_same(f"{_MEGATRON}.optimizer", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
    Row(
        f"{_MEGATRON}.optimizer.optimizer_offload_fraction",
        f"{_MEGATRON}.optimizer.optimizer_offload_fraction",
        "theirs may be 0: nothing is offloaded; ours is above 0",
        lambda value: value or 1.0,
    ),
    Row(
        f"{_MEGATRON}.optimizer.use_distributed_optimizer",
        f"{_MEGATRON}.distributed_data_parallel_config.use_distributed_optimizer",
    ),
    *_none(f"{_MEGATRON}.optimizer", "is `policy.max_grad_norm`", "clip_grad"),
    *_none(f"{_MEGATRON}.optimizer", "the optimizer keeps float32 masters; `policy.precision`", "*", off="float32"),
    *_same(f"{_MEGATRON}.scheduler", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters"),
    Row(f"{_MEGATRON}.scheduler.lr_warmup_init", f"{_MEGATRON}.scheduler.lr_warmup_iters", "begins at 0", None),
    *_none(
        f"{_MEGATRON}.scheduler",
        "the weight decay is constant: `optimizer.weight_decay`",
        "start_weight_decay",
        "end_weight_decay",
        "weight_decay_incr_style",
        off="constant",
    ),
    *_same(f"{_MEGATRON}.distributed_data_parallel_config", "grad_reduce_in_fp32", "overlap_grad_reduce"),
    *_none(f"{_MEGATRON}.distributed_data_parallel_config", _ENGINE, "*"),
    *_none(f"{_MEGATRON}.peft", "no LoRA", "*"),
    *_none(f"{_MEGATRON}.fp8_cfg", "no FP8", "*"),
    *_none(_MEGATRON, "no multi-token prediction", "mtp_num_layers", "mtp_loss_scaling_factor"),
    *_none(_MEGATRON, "no multi-token prediction", "mtp_use_repeated_layer", "mtp_detach_heads"),
    *_none(_MEGATRON, _ENGINE, "*", off="none"),
    # Generation.
    Row("policy.generation.backend", "policy.generation.backend", "`vllm` or `megatron`", None),
    *_same("policy.generation", "temperature", "top_p", "top_k", "stop_token_ids", "stop_strings"),
    Row(
        "policy.generation.max_new_tokens",
        "policy.generation.max_new_tokens",
        "theirs is cut by the longest sequence, ours has to fit beside the prompt: what `data.max_input_seq_length`"
        " leaves of it, and at least half",
        None,
    ),
    Row("policy.generation.val_temperature", "grpo.val_temperature"),
    *_none("policy.generation", "validation samples as training, but for its temperature", "val_top_p", off=1.0),
    *_none("policy.generation", "validation samples as training, but for its temperature", "val_top_k"),
    Row(f"{_VLLM}.tensor_parallel_size", "policy.generation.vllm.tensor_parallel_size"),
    Row(f"{_VLLM}.gpu_memory_utilization", "policy.generation.vllm.gpu_memory_utilization"),
    Row(
        f"{_VLLM}.expert_parallel_size",
        "policy.generation.vllm.expert_parallel",
        "above 1 is true: over the engine's GPUs",
        lambda value: (value or 1) > 1,
    ),
    Row(f"{_VLLM}.precision", "policy.generation.vllm.dtype", "no FP8", None),
    *_none(_VLLM, "an engine's sequences have `policy.max_total_sequence_length` tokens", "max_model_len"),
    *_none(_VLLM, "engines are not cut in stages", "pipeline_parallel_size", off=1),
    *_none(_VLLM, _ENGINE, "*"),
    *_none("policy.generation.vllm_kwargs", _ENGINE, "*"),
    *_none("policy.generation.mcore_generation_config", "the training workers generate", "*"),
    *_none("policy.generation.refit_cfg", "`policy.generation.weight_transport`", "*"),
    *_none("policy.generation", "`policy.generation.weight_transport`", "refit_transport"),
    Row(
        "policy.generation.colocated.enabled",
        "cluster.roles.generation",
        "false: engines on GPUs of their own, which `cluster` counts beside the policy's, not among them",
        None,
    ),
    Row("policy.generation.colocated.resources.gpus_per_node", "cluster.roles.generation", "see there", None),
    Row("policy.generation.colocated.resources.num_nodes", "cluster.roles.generation", "see there", None),
    *_none("policy.generation", _ENGINE, "*"),
    # Data and rewards.
    *_same("data", "shuffle"),
    Row("data.train.dataset_name", "data.train.path", "a hub's name or a file; see the table of names", None),
    Row("data.train.data_path", "data.train.path", "", None),
    Row("data.train.split", "data.train.split", "", None),
    Row("data.train.input_key", "data.prompt_key", "GRPO", None),
    Row("data.train.output_key", "data.answer_key", "GRPO", None),
    Row("data.validation", "data.validation", "", None),
    Row("data.validation.dataset_name", "data.validation.path", "as of `train`", None),
    Row("data.validation.data_path", "data.validation.path", "", None),
    Row("data.validation.split", "data.validation.split", "", None),
    *_none("data.train", "write the held-out samples into a file of their own", "split_validation_size"),
    *_none("data.train", "see `split_validation_size`", "seed"),
    Row(
        "data.default.prompt_file",
        "data.prompt_template",
        "the file's text, with `{prompt}` in place of `{}`; null: none",
        None,
    ),
    *_none("data.default", "a message of each record, or words in the chat template", "system_prompt_file"),
    *_none("data.default", "records are read by their form: docs/data.md", "*"),
    Row("data.max_input_seq_length", "policy.generation.max_new_tokens", "see there", None),
    *_none("data", "the chat template alone decides", "add_bos", "add_eos", "add_generation_prompt"),
    *_none("data", "data is read before the first step", "num_workers", off=1),
    *_none("data", "an older form: `data.train`", "dataset_name", "prompt_file", "add_system_prompt"),
    *_none("data", "one set of samples", "use_multiple_dataloader"),
    *_none("data.train", "of a data set of theirs", "*"),
    *_none("data.validation", "of a data set of theirs", "*"),
    Row("env.math.num_workers", "env.num_workers", "", None),
    *_none("env.math", "math-verify alone", "math_verify_impl", off="hf_math_verify"),
    *_none(
        "env.math_multi_reward",
        "a function that returns a dict of rewards: `env.name: callable`, `env.reward_weights`",
        "*",
    ),
    *_none("env", "environments: docs/adding-an-environment.md", "*"),
    # The run.
    *_same("logger", "log_dir", "wandb_enabled", "tensorboard_enabled", "mlflow_enabled"),
    *_same("logger", "wandb.project", "wandb.name", "mlflow.experiment_name", "mlflow.run_name", "mlflow.tracking_uri"),
    Row("logger.num_val_samples_to_print", "logger.num_samples_to_print", "GRPO", None),
    *_none("logger.tensorboard", "beside the other files of the run", "*"),
    *_none("logger", "no such logger", "swanlab_enabled", "swanlab.*"),
    *_none("logger", "no figures of the GPUs", "monitor_gpus", "gpu_monitoring.*"),
    *_none("logger.wandb", "no such table", "log_nemo_gym_full_result_tables"),
    Row("cluster.num_nodes", "cluster.num_nodes", "", None),
    Row("cluster.gpus_per_node", "cluster.gpus_per_node", "", None),
    *_none("cluster", "Ray places the workers", "*"),
    *_none("data_plane", "rows travel through Ray's object store", "*"),
    *_none("on_policy_distillation", "examples/algorithms/on_policy_distillation.py", "*"),
)


def row_of(key: str) -> Row | None:
    """The row of a full key: its own, or that of the nearest section above; None where the table has none."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    parts = key.split(".")
    above = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1))
    return next((_BY_KEY[section] for section in above if section in _BY_KEY), _BY_KEY.get(f"{key}.*"))


_BY_KEY = {row.theirs: row for row in reversed(ROWS)}

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's keys of generation, data, rewards, loggers and machines, each with its counterpart here."""

from nemo_rl_moe.config.nemo_rl_row import ENGINE, Row, no_counterpart, same_names

IMAGE_ENVIRONMENTS = ("clevr-cogent", "geometry3k", "refcoco")
"""Environments of theirs for images with questions."""
PLACE_OF_ENGINES = "cluster.roles.generation"
"""Machines of engines that are not the policy's."""
_VLLM = "policy.generation.vllm_cfg"

RUN_ROWS: tuple[Row, ...] = (
    # Generation.
    Row("policy.generation.backend", "policy.generation.backend", "`vllm` or `megatron`", None),
    *same_names("policy.generation", "temperature", "top_p", "top_k", "stop_token_ids", "stop_strings"),
    Row(
        "policy.generation.max_new_tokens",
        "policy.generation.max_new_tokens",
        "theirs is cut by the longest sequence, ours has to fit beside the prompt: what `data.max_input_seq_length`"
        " leaves of it, and at least half",
        None,
    ),
    Row("policy.generation.val_temperature", "grpo.val_temperature"),
    *no_counterpart(
        "policy.generation", "validation samples as training, but for its temperature", "val_top_p", off=1.0
    ),
    *no_counterpart("policy.generation", "validation samples as training, but for its temperature", "val_top_k"),
    Row(f"{_VLLM}.tensor_parallel_size", "policy.generation.vllm.tensor_parallel_size"),
    Row(f"{_VLLM}.gpu_memory_utilization", "policy.generation.vllm.gpu_memory_utilization"),
    Row(
        f"{_VLLM}.expert_parallel_size",
        "policy.generation.vllm.expert_parallel",
        "above 1 is true: over the engine's GPUs",
        lambda value: (value or 1) > 1,
    ),
    Row(f"{_VLLM}.precision", "policy.generation.vllm.dtype", "no FP8", None),
    *no_counterpart(_VLLM, "an engine's sequences have `policy.max_total_sequence_length` tokens", "max_model_len"),
    *no_counterpart(_VLLM, "engines are not cut in stages", "pipeline_parallel_size", off=1),
    *no_counterpart(_VLLM, ENGINE, "*"),
    *no_counterpart("policy.generation.vllm_kwargs", ENGINE, "*"),
    *no_counterpart("policy.generation.mcore_generation_config", "the training workers generate", "*"),
    *no_counterpart("policy.generation.refit_cfg", "`policy.generation.weight_transport`", "*"),
    *no_counterpart("policy.generation", "`policy.generation.weight_transport`", "refit_transport"),
    Row(
        "policy.generation.colocated.enabled",
        PLACE_OF_ENGINES,
        "false: engines on GPUs of their own, which `cluster` counts beside the policy's, not among them",
        None,
    ),
    Row("policy.generation.colocated.resources.gpus_per_node", PLACE_OF_ENGINES, "see there", None),
    Row("policy.generation.colocated.resources.num_nodes", PLACE_OF_ENGINES, "see there", None),
    *no_counterpart("policy.generation", ENGINE, "*"),
    # Data and rewards.
    *same_names("data", "shuffle"),
    Row("data.train.dataset_name", "data.train.path", "a hub's name or a file; see the table of names", None),
    Row("data.train.data_path", "data.train.path", "", None),
    Row("data.train.split", "data.train.split", "", None),
    Row("data.train.input_key", "data.prompt_key", "GRPO; in SFT records are read by their form: docs/data.md", None),
    Row("data.train.output_key", "data.answer_key", "as above", None),
    Row("data.train.env_name", "env.name", "`math`, and of images with questions", None),
    Row("data.validation", "data.validation", "", None),
    Row("data.validation.dataset_name", "data.validation.path", "as of `train`", None),
    Row("data.validation.data_path", "data.validation.path", "", None),
    Row("data.validation.split", "data.validation.split", "", None),
    *no_counterpart("data.train", "write the held-out samples into a file of their own", "split_validation_size"),
    *no_counterpart("data.train", "see `split_validation_size`", "seed"),
    Row(
        "data.default.prompt_file",
        "data.prompt_template",
        "GRPO: the file's text, with `{prompt}` in place of `{}`; null: none",
        None,
    ),
    Row("data.train.prompt_file", "data.prompt_template", "as above", None),
    *(
        Row(f"data.default.{theirs}", f"data.{ours}", "of sets that do not say it themselves", None)
        for theirs, ours in (
            ("dataset_name", "train.path"),
            ("data_path", "train.path"),
            ("split", "train.split"),
            ("input_key", "prompt_key"),
            ("output_key", "answer_key"),
        )
    ),
    *no_counterpart("data.default", "a message of each record, or words in the chat template", "system_prompt_file"),
    Row("data.default.env_name", "env.name", "`math`, and of images with questions", None),
    *no_counterpart("data.default", "records are read by their form: docs/data.md", "*"),
    Row(
        "data.max_input_seq_length",
        "policy.generation.max_new_tokens",
        "GRPO: see there",
        None,
        repeats="policy.max_total_sequence_length",
    ),
    *no_counterpart("data", "the chat template alone decides", "add_bos", "add_eos", "add_generation_prompt"),
    *no_counterpart("data", "data is read before the first step", "num_workers", off=1),
    *no_counterpart("data", "an older form: `data.train`", "dataset_name", "prompt_file", "add_system_prompt"),
    *no_counterpart(
        "data", "one set of samples", "use_multiple_dataloader", "custom_dataloader", "num_prompts_per_dataloader"
    ),
    *no_counterpart("data.train", "of a data set of theirs", "*"),
    *no_counterpart("data.validation", "of a data set of theirs", "*"),
    Row("env.math.num_workers", "env.num_workers", "", None),
    *no_counterpart("env.math", "math-verify alone", "math_verify_impl", off="hf_math_verify"),
    *no_counterpart(
        "env.math_multi_reward",
        "a function that returns a dict of rewards: `env.name: callable`, `env.reward_weights`",
        "*",
    ),
    # Images with questions: those of the data set that is trained on.
    *(Row(f"env.{name}.num_workers", "env.num_workers", "of the chosen one", None) for name in IMAGE_ENVIRONMENTS),
    *(
        Row(f"env.{name}.reward_functions", "env.name", "`exact_alnum` is `exact`, `math_expr` `math`", None)
        for name in IMAGE_ENVIRONMENTS
    ),
    *no_counterpart("env", "environments: docs/adding-an-environment.md", "*"),
    # The run.
    *same_names("logger", "log_dir", "wandb_enabled", "tensorboard_enabled", "mlflow_enabled"),
    *same_names(
        "logger", "wandb.project", "wandb.name", "mlflow.experiment_name", "mlflow.run_name", "mlflow.tracking_uri"
    ),
    Row("logger.num_val_samples_to_print", "logger.num_samples_to_print", "GRPO", None),
    *no_counterpart("logger.tensorboard", "beside the other files of the run", "*"),
    *no_counterpart("logger", "no such logger", "swanlab_enabled", "swanlab.*"),
    *no_counterpart("logger", "no figures of the GPUs", "monitor_gpus", "gpu_monitoring.*"),
    *no_counterpart("logger.wandb", "no such table", "log_nemo_gym_full_result_tables"),
    Row("cluster.num_nodes", "cluster.num_nodes", "", None),
    Row("cluster.gpus_per_node", "cluster.gpus_per_node", "", None),
    *no_counterpart("cluster", "Ray places the workers", "*"),
    *no_counterpart("data_plane", "rows travel through Ray's object store", "*"),
    *no_counterpart("on_policy_distillation", "examples/algorithms/on_policy_distillation.py", "*"),
)

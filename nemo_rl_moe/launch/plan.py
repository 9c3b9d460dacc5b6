# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layout, parameters and memory of a run, calculated without starting the run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.checks_run import model_folder_exists, role_model_folders_exist
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.distributed.accelerators import Target
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.plan_changes import change_lines
from nemo_rl_moe.launch.plan_gpus import (
    UNITS,
    aligned,
    engine_lines,
    fit_line,
    fit_of,
    has_engine_beside,
    moment_lines,
    table,
    unit_for,
)
from nemo_rl_moe.launch.plan_roles import role_lines, role_memories
from nemo_rl_moe.launch.setup import announce_moe, model_warnings
from nemo_rl_moe.models.hf_files import load_config_json, load_hf_config
from nemo_rl_moe.models.megatron.model.memory_estimate import (
    WorkerMemory,
    active_parameters,
    expert_data_parallel_size,
    generation_batch_size,
    microbatch_patches,
    microbatch_tokens,
    rank_parameters,
    whole_model_parameters,
    worker_memory,
)
from nemo_rl_moe.models.megatron.model.memory_moments import PROCESS_BYTES, fullest, moments
from nemo_rl_moe.models.megatron.model.planned_machine import planned_with_gpus
from nemo_rl_moe.models.megatron.model.router_settings import setting_sources
from nemo_rl_moe.models.megatron.model.stages import layers_of_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import (
    TransformerConfig,
    build_transformer_config,
    effective_moe_configuration,
    num_trained_mtp_layers,
)
from nemo_rl_moe.models.position_limit import too_long_sequences
from nemo_rl_moe.routing.routers import moe_layer_indices
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

_FULLEST = "at the fullest moment, at least"
_TOWER, _IN_THE_OPTIMIZER, _HOST = "+ of the vision tower", "+ in the optimizer", "in the host's memory: "
_ONLY_WHERE_THERE_ARE_ANY = (_TOWER, _IN_THE_OPTIMIZER, _HOST)
"""A row is omitted if its label begins with one of these and all its values are 0."""
_NOT_COUNTED = "not counted: the rest of the activations, buffers of kernels, what the allocator cannot use"


def print_plan(
    config: MasterConfig, target: Target | None = None, load: Callable[[Sequence[str]], MasterConfig] | None = None
) -> None:
    """Print the plan of a run. Of the models, only `config.json` is read.

    Args:
        target: Machines. None: machines like this one.
        load: Function that loads the configuration with further overrides, to find changes with which a run fits. None:
            no search.
    """
    if problems := [*model_folder_exists(config), *role_model_folders_exist(config)]:
        raise ConfigurationError(problems)
    hf_config, config_json = load_hf_config(config.policy.model_name), load_config_json(config.policy.model_name)
    if problems := too_long_sequences(config.policy, config_json):
        raise ConfigurationError(problems)
    if isinstance(config, GRPOMasterConfig):
        config.policy.generation.engine.check_model(config, hf_config)
    with planned_with_gpus() if target is not None else nullcontext():
        transformer = build_transformer_config(config.policy, hf_config)
        roles = role_memories(config)
    console = ConsoleLogger(total_steps=0, live="never")
    for line in [*layout_lines(config, transformer), "", *parameter_lines(config, transformer, hf_config), ""]:
        console.message(line)
    memory = memory_lines(config, transformer, hf_config)
    memory += engine_lines(config, transformer, hf_config, target)
    if has_engine_beside(config):
        memory += ["", *moment_lines(config, transformer, hf_config, target)]
    if target is not None:
        fit = fit_of(config, transformer, hf_config, target)
        memory.append(f"  {fit_line(fit, target)}")
        if not fit.is_fitting and load is not None:
            memory += [f"    {line}" for line in change_lines(config, fit, target, load)]
    if roles:
        memory += ["", *role_lines(roles, target)]
    for line in [*memory, ""]:
        console.message(line)
    sources = setting_sources(config.policy, hf_config, config_json, transformer)
    announce_moe(console, effective_moe_configuration(transformer), sources)
    for line in model_warnings(config.policy, hf_config, config_json, transformer):
        console.warn(line)


def layout_lines(config: MasterConfig, transformer: TransformerConfig) -> list[str]:
    """Return lines on the run's workers, and on the part of the model that each worker holds."""
    megatron, cluster = config.policy.megatron_cfg, config.cluster
    kind = "GPUs" if cluster.gpus_per_node else "CPU workers"
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    rows = [
        ("model", config.policy.model_name),
        ("workers", f"{cluster.world_size} ({nodes} x {cluster.workers_per_node} {kind})"),
        ("data parallel (DP)", str(config.data_parallel_size)),
        ("tensor parallel (TP)", str(megatron.tensor_model_parallel_size)),
        ("pipeline parallel (PP)", _pipeline(transformer)),
    ]
    if megatron.context_parallel_size > 1:
        rows.append(("context parallel (CP)", str(megatron.context_parallel_size)))
    if transformer.num_moe_experts is not None:
        experts = transformer.num_moe_experts // megatron.expert_model_parallel_size
        rows += [
            ("expert parallel (EP)", str(megatron.expert_model_parallel_size)),
            ("experts of each MoE layer, a rank", f"{experts} of {transformer.num_moe_experts}"),
            ("expert-tensor parallel (ETP)", str(megatron.expert_tensor_parallel_size)),
            ("copies of the experts", str(expert_data_parallel_size(config))),
        ]
    for stage in range(transformer.pipeline_model_parallel_size):
        rows.append((f"layers of stage {stage}", _layers_of_stage(transformer, stage)))
    rows.append(("samples of an update", str(config.policy.train_global_batch_size)))
    algorithm = algorithm_of(config)
    if algorithm.generates:
        rows.append(("updates of a step", str(algorithm.updates_per_step(config))))
    rows.append(("microbatches of an update", _microbatches(config)))
    return ["Layout:", *aligned(rows)]


def parameter_lines(config: MasterConfig, transformer: TransformerConfig, hf_config: Any) -> list[str]:
    """Return lines on the number of parameters of the model and of each kind of worker."""
    rows = [
        ("whole model", _billions(whole_model_parameters(transformer, hf_config))),
        ("active for each token", _billions(active_parameters(transformer, hf_config))),
    ]
    stages = transformer.pipeline_model_parallel_size
    for stage in range(stages):
        mtp_layers = num_trained_mtp_layers(config.policy, hf_config)
        held = rank_parameters(transformer, hf_config, stage, lora=config.policy.lora, mtp_layers=mtp_layers)
        where = f" of stage {stage}" if stages > 1 else ""
        experts = f", of them {_billions(held.experts)} in routed experts" if held.experts else ""
        if config.policy.lora is not None:
            rows.append((f"each worker{where}: frozen", _billions(held.frozen)))
            rows.append((f"each worker{where}: adapters", _billions(held.trained) + experts))
            continue
        rows.append((f"each worker{where}", _billions(held.total) + experts))
    return ["Parameters, by arithmetic:", *aligned(rows)]


def memory_lines(config: MasterConfig, transformer: TransformerConfig, hf_config: Any) -> list[str]:
    """Return a table of the memory of a worker, with a column for each pipeline stage."""
    stages = range(transformer.pipeline_model_parallel_size)
    workers = [worker_memory(config, transformer, hf_config, stage) for stage in stages]
    rows = _memory_rows(config, workers, microbatch_patches(config, hf_config))
    unit = unit_for(worker.peak_at_least for worker in workers)
    heads = [f"stage {stage}" for stage in stages] if len(stages) > 1 else [unit]
    place = "GPU" if config.cluster.gpus_per_node else "host"
    heading = f"{place} memory of each worker, by arithmetic, in {unit} of {UNITS[unit]:,} bytes:"
    return [heading, *table(heads, rows, unit), f"  {_NOT_COUNTED}"]


def _memory_rows(config: MasterConfig, workers: Sequence[WorkerMemory], patches: int) -> list[tuple[str, list[int]]]:
    parallel = config.policy.megatron_cfg.distributed_data_parallel_config
    precision = config.policy.precision
    gradients = "float32" if parallel.grad_reduce_in_fp32 else precision
    rows = [
        (f"weights ({precision})", [worker.weights for worker in workers]),
        (f"gradients ({gradients})", [worker.gradients for worker in workers]),
        (_optimizer_label(config), [worker.optimizer.state for worker in workers]),
        ("held all the time", [worker.always for worker in workers]),
        (
            f"+ in a backward pass, {microbatch_tokens(config)} tokens: activations, at least",
            [worker.activations_at_least for worker in workers],
        ),
        (
            f"{_TOWER}, up to {patches} patches (not in the sums): activations, at least",
            [worker.tower_activations for worker in workers],
        ),
        (f"{_IN_THE_OPTIMIZER}: gradients (float32)", [worker.optimizer.float32_gradients for worker in workers]),
        (f"{_IN_THE_OPTIMIZER}: moments (float32)", [worker.optimizer.float32_moments for worker in workers]),
    ]
    is_moved = any(worker.is_moved for worker in workers)
    if is_moved:
        rows[3] = ("held while training", rows[3][1])
        rows.append(("held while generating: weights", [worker.while_generating for worker in workers]))
    if generation_batch_size(config):
        sequences = f"{generation_batch_size(config)} x {config.policy.max_total_sequence_length} tokens"
        cache = f"+ while generating, {sequences}: key-value cache"
        rows.append((cache, [worker.key_value_cache for worker in workers]))
    if config.cluster.gpus_per_node == 0:
        rows.append((_FULLEST, [worker.peak_at_least for worker in workers]))
    elif not has_engine_beside(config):  # with such an engine, the memory depends on the GPU's size
        rows.append(("+ CUDA's context and NCCL, an estimate", [PROCESS_BYTES for _ in workers]))
        rows.append((_FULLEST, [fullest(moments(worker, None)).total for worker in workers]))
    rows.append((f"{_HOST}optimizer", [worker.optimizer.on_the_host for worker in workers]))
    rows.append((f"{_HOST}optimizer, while generating", [worker.moved for worker in workers]))
    rows.append((f"{_HOST}reference weights", [worker.reference_weights for worker in workers]))
    if config.cluster.gpus_per_node:
        rows.append((f"{_HOST}snapshot of a checkpoint", [worker.snapshot for worker in workers]))
    return [(label, values) for label, values in rows if any(values) or not label.startswith(_ONLY_WHERE_THERE_ARE_ANY)]


def _optimizer_label(config: MasterConfig) -> str:
    megatron = config.policy.megatron_cfg
    chosen = megatron.optimizer
    sharded = ", sharded" if megatron.distributed_data_parallel_config.use_distributed_optimizer else ""
    master = "" if config.policy.precision == "float32" else "master weights and "
    moments = sorted({chosen.exp_avg_dtype, chosen.exp_avg_sq_dtype})
    if moments != ["float32"]:
        return f"optimizer: master weights (float32) and two moments ({' and '.join(moments)}{sharded})"
    here = ""
    if chosen.optimizer_cpu_offload:
        master = "master weights, gradients and "
        here = f", {1 - chosen.optimizer_offload_fraction:.0%} of them"
    return f"optimizer: {master}two moments (float32{sharded}){here}"


def _pipeline(transformer: TransformerConfig) -> str:
    pieces = transformer.virtual_pipeline_model_parallel_size
    stages = str(transformer.pipeline_model_parallel_size)
    return f"{stages}, {pieces} pieces a stage" if pieces else stages


def _layers_of_stage(transformer: TransformerConfig, stage: int) -> str:
    chunks = layers_of_chunks(transformer, stage)
    spans = ", ".join(f"{chunk[0]} to {chunk[-1]}" if len(chunk) > 1 else str(chunk[0]) for chunk in chunks)
    if transformer.num_moe_experts is None:
        return spans
    with_experts = sum(index in chunk for chunk in chunks for index in moe_layer_indices(transformer))
    return f"{spans}; {with_experts} with experts"


def _microbatches(config: MasterConfig) -> str:
    policy, copies = config.policy, config.data_parallel_size
    samples = policy.train_global_batch_size // copies
    if policy.sequence_packing.enabled or policy.dynamic_batching.enabled:
        return f"at most {samples} on each data-parallel rank, by the samples' lengths"
    return f"{samples // policy.train_micro_batch_size} on each data-parallel rank"


def _billions(number: int) -> str:
    if number >= 10**8:
        return f"{number / 1e9:.3f} billion ({number:,})"
    return f"{number:,}"

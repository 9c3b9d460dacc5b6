# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layout, parameters and memory of a run by arithmetic, without starting it."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.checks_run import model_folder_exists
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.distributed.accelerators import Target
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.setup import announce_moe, model_warnings
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.models.hf_files import load_config_json, load_hf_config
from nemo_rl_moe.models.megatron.model.engine_memory import EngineMemory, bytes_on_the_way, engine_memory
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
from nemo_rl_moe.models.megatron.model.planned_machine import planned_with_gpus
from nemo_rl_moe.models.megatron.model.router_settings import setting_sources
from nemo_rl_moe.models.megatron.model.transformer_config import (
    build_transformer_config,
    effective_moe_configuration,
    layers_of_chunks,
    moe_layer_indices,
)
from nemo_rl_moe.models.position_limit import too_long_sequences

# isort: split
from megatron.core.transformer.transformer_config import TransformerConfig

_GPU_SIZES_GB = (80, 141)
_UNITS = {"GB": 10**9, "MB": 10**6}
_TOWER, _IN_THE_OPTIMIZER, _HOST = "+ of the vision tower", "+ in the optimizer", "in the host's memory: "
_ONLY_WHERE_THERE_ARE_ANY = (_TOWER, _IN_THE_OPTIMIZER, _HOST)
"""First parts of labels of rows that are left out where all of them are 0."""
_NOT_COUNTED = "not counted: the rest of the activations, buffers of kernels and of communication, the driver's own"


def print_plan(config: MasterConfig, target: Target | None = None) -> None:
    """Prints the plan of a run.

    Args:
        config: A checked configuration; of the files that it names, the model's `config.json` alone is read.
        target: Machines that it is for; None: such as this one.

    Raises:
        ConfigurationError: The model cannot be found or is not supported, or Megatron-Core refuses the combination.
    """
    if problems := list(model_folder_exists(config)):
        raise ConfigurationError(problems)
    hf_config, config_json = load_hf_config(config.policy.model_name), load_config_json(config.policy.model_name)
    if problems := too_long_sequences(config.policy, config_json):
        raise ConfigurationError(problems)
    with planned_with_gpus() if target is not None else nullcontext():
        transformer = build_transformer_config(config.policy, hf_config)
    console = ConsoleLogger(total_steps=0, live="never")
    for line in [*layout_lines(config, transformer), "", *parameter_lines(config, transformer, hf_config), ""]:
        console.message(line)
    memory = memory_lines(config, transformer, hf_config)
    if target is not None:
        memory.append(f"  {fit_line(config, transformer, hf_config, target)}")
    for line in [*memory, ""]:
        console.message(line)
    if isinstance(config, GRPOMasterConfig) and config.policy.generation.backend == "vllm":
        for line in [*engine_lines(config, transformer, hf_config, target), ""]:
            console.message(line)
    sources = setting_sources(config.policy, hf_config, config_json, transformer)
    announce_moe(console, effective_moe_configuration(transformer), sources)
    for line in model_warnings(config.policy, hf_config, config_json, transformer):
        console.warn(line)


def layout_lines(config: MasterConfig, transformer: TransformerConfig) -> list[str]:
    """Lines on the workers of the run and the part of the model that each holds."""
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
    return ["Layout:", *_aligned(rows)]


def parameter_lines(config: MasterConfig, transformer: TransformerConfig, hf_config: Any) -> list[str]:
    """Lines on the parameters of the model and of each kind of worker."""
    rows = [
        ("whole model", _billions(whole_model_parameters(transformer, hf_config))),
        ("active for each token", _billions(active_parameters(transformer, hf_config))),
    ]
    stages = transformer.pipeline_model_parallel_size
    for stage in range(stages):
        held = rank_parameters(transformer, hf_config, stage)
        where = f" of stage {stage}" if stages > 1 else ""
        experts = f", of them {_billions(held.experts)} in routed experts" if held.experts else ""
        rows.append((f"each worker{where}", _billions(held.total) + experts))
    return ["Parameters, by arithmetic:", *_aligned(rows)]


def memory_lines(config: MasterConfig, transformer: TransformerConfig, hf_config: Any) -> list[str]:
    """Table of the memory of each worker, a column for each pipeline stage."""
    stages = range(transformer.pipeline_model_parallel_size)
    workers = [worker_memory(config, transformer, hf_config, stage) for stage in stages]
    rows = _memory_rows(config, workers, microbatch_patches(config, hf_config))
    # Small models, for trying things out, are told in smaller units.
    unit = "GB" if max(worker.peak_at_least for worker in workers) >= 10**8 else "MB"
    cells = [[f"{value / _UNITS[unit]:.2f}" for value in values] for _, values in rows]
    heads = [f"stage {stage}" for stage in stages] if len(stages) > 1 else [unit]
    label_width = max(len(label) for label, _ in rows)
    width = max(len(cell) for cell in [*heads, *(cell for row in cells for cell in row)])
    table = [
        f"  {label:<{label_width}}  " + "  ".join(f"{cell:>{width}}" for cell in row)
        for (label, _), row in zip([("", ()), *rows], [heads, *cells], strict=True)
    ]
    place = "GPU" if config.cluster.gpus_per_node else "host"
    heading = f"{place} memory of each worker, by arithmetic, in {unit} of {_UNITS[unit]:,} bytes:"
    return [heading, *table, f"  {_NOT_COUNTED}"]


def fit_line(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, target: Target) -> str:
    """Line on the target's memory: how much of it the fullest worker leaves, of what is counted."""
    memory = target.card.memory_gb * _UNITS["GB"]
    stages = range(transformer.pipeline_model_parallel_size)
    workers = [worker_memory(config, transformer, hf_config, stage) for stage in stages]
    beside = _share_of_engines(config) * memory
    fullest = max(max(worker.peak_at_least, worker.while_generating + beside) for worker in workers)
    of_it = f"the {target.card.memory_gb} GB of each {target.card.name}"
    if fullest > memory:
        return f"{target}: does not fit: {fullest / _UNITS['GB']:.2f} GB are more than {of_it}"
    if _engines_lack_room(config, transformer, hf_config, memory):
        return f"{target}: does not fit: an engine's weights and a cache are more than its share of {of_it}"
    return f"{target}: fits, with {1 - fullest / memory:.0%} of {of_it} to spare"


def _engines_lack_room(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, memory: float) -> bool:
    """True where vLLM's engines, on the trainer's GPUs or on their own, have no room for their weights and a cache."""
    if not isinstance(config, GRPOMasterConfig) or config.policy.generation.backend != "vllm":
        return False
    return (
        engine_memory(config, transformer, hf_config).cache(
            int(memory), config.policy.generation.vllm.gpu_memory_utilization
        )
        <= 0
    )


def _share_of_engines(config: MasterConfig) -> float:
    """Share of each of the trainer's GPUs that an engine takes while it generates."""
    generates = generating(config.policy)
    if generates is None or generates.generation.backend != "vllm" or GENERATION_ROLE in config.cluster.roles:
        return 0.0
    return generates.generation.vllm.gpu_memory_utilization


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
            f"{_TOWER}, up to {patches} patches (in no sum): activations, at least",
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
    rows.append(("at the fullest moment, at least", [worker.peak_at_least for worker in workers]))
    rows.append((f"{_HOST}optimizer", [worker.optimizer.on_the_host for worker in workers]))
    rows.append((f"{_HOST}optimizer, while generating", [worker.moved for worker in workers]))
    rows.append((f"{_HOST}reference weights", [worker.reference_weights for worker in workers]))
    return [(label, values) for label, values in rows if any(values) or not label.startswith(_ONLY_WHERE_THERE_ARE_ANY)]


def _optimizer_label(config: MasterConfig) -> str:
    """Name of the row of what the optimizer holds on the device."""
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


def engine_lines(
    config: GRPOMasterConfig, transformer: TransformerConfig, hf_config: Any, target: Target | None = None
) -> list[str]:
    """Lines on the engines of `backend: vllm`: their places, their memory, and what lies beside them meanwhile."""
    chosen, longest = config.policy.generation.vllm, config.policy.max_total_sequence_length
    memory = engine_memory(config, transformer, hf_config)
    on_the_way = bytes_on_the_way(config, transformer, hf_config)
    stages = range(transformer.pipeline_model_parallel_size)
    held = max(worker_memory(config, transformer, hf_config, stage).while_generating for stage in stages)
    unit = "GB" if memory.weights >= 10**8 else "MB"

    def shown(value: float) -> str:
        return f"{value / _UNITS[unit]:.2f}"

    number, ranks = num_engines(config), chosen.tensor_parallel_size
    gpus = f", of {ranks} {'GPU' if ranks == 1 else 'GPUs'} each" if _on_gpus(config) else ""
    rows = [
        ("engines", f"{number}{gpus}"),
        (f"weights of each rank ({chosen.dtype or config.policy.precision})", shown(memory.weights)),
        (f"key-value cache of a sequence, {longest} tokens", shown(memory.cache_of_a_token * longest)),
    ]
    if _on_gpus(config):
        rows += _device_rows(chosen.gpu_memory_utilization, memory, held, longest, target)
    else:
        rows.append(
            (
                "key-value cache of each engine (policy.generation.vllm.cpu_cache_gib)",
                shown(chosen.cpu_cache_gib * 2**30),
            )
        )
    where = "shared memory" if config.cluster.num_nodes == 1 else "checkpointing.checkpoint_dir"
    rows.append((f"in {where} while weights are sent, at most", shown(on_the_way)))
    heading = f"Engines of vLLM, by arithmetic, in {unit} of {_UNITS[unit]:,} bytes:"
    return [heading, *_aligned(rows), "  not counted: the engines' activations, buffers and graphs"]


def _device_rows(
    utilization: float, memory: EngineMemory, held: int, longest: int, target: Target | None
) -> list[tuple[str, str]]:
    """Rows on a GPU that an engine shares with the trainer, in GB."""
    least = memory.fits_from(held, utilization) / _UNITS["GB"]
    rows = [
        ("a GPU's share for its engine (policy.generation.vllm.gpu_memory_utilization)", f"{utilization:g}"),
        ("beside it while it generates: held by the trainer, in GB", f"{held / _UNITS['GB']:.2f}"),
        ("while training: engines sleep, without weights and cache", "0.00"),
        ("GPUs on which both fit, from so many GB on", f"{least:.0f}" if math.isfinite(least) else "none"),
    ]
    for size in _GPU_SIZES_GB if target is None else (target.card.memory_gb,):
        cache = memory.cache(size * _UNITS["GB"], utilization)
        fits = size >= least and cache > 0
        sequences = f", {cache // (memory.cache_of_a_token * longest):,} such sequences"
        value = f"{cache / _UNITS['GB']:.2f}{sequences}" if fits else "they do not fit"
        rows.append((f"GPUs with {size} GB: key-value cache, in GB", value))
    return rows


def num_engines(config: GRPOMasterConfig) -> int:
    """Engines of `backend: vllm`: as many as are asked for, or as the GPUs give; one on CPUs."""
    chosen, cluster = config.policy.generation.vllm, config.cluster
    places = cluster.gpus_per_node // chosen.tensor_parallel_size * cluster.num_nodes if cluster.gpus_per_node else 1
    return chosen.num_engines or places


def _on_gpus(config: MasterConfig) -> bool:
    return config.cluster.gpus_per_node > 0


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


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [f"  {label:<{width}}  {value}" for label, value in rows]

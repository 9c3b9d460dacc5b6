# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Lines of a plan on the GPUs of a run: engines, the memory of a GPU at each moment, and whether it fits."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.config.engine import EngineSize
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig, engines_share_gpus
from nemo_rl_moe.distributed.accelerators import Target
from nemo_rl_moe.distributed.shared_gpu import Entry
from nemo_rl_moe.models.megatron.model.engine_memory import (
    ON_DEVICE,
    EngineMemory,
    bytes_on_the_way,
    engine_memory,
    refit_bytes,
)
from nemo_rl_moe.models.megatron.model.memory_estimate import WorkerMemory, worker_memory
from nemo_rl_moe.models.megatron.model.memory_moments import (
    KEPT_BYTES,
    PROCESS_BYTES,
    EngineShare,
    fullest,
    moments,
    smallest_device,
)
from nemo_rl_moe.models.megatron.model.transformer_config import TransformerConfig

UNITS = {"GB": 10**9, "MB": 10**6}
_GPU_SIZES_GB = (80, 141)


def engine_size(config: MasterConfig) -> EngineSize | None:
    """Return the size of engines with a copy of the weights, or None if there are no such engines or their size is
    unknown."""
    if not isinstance(config, GRPOMasterConfig):
        return None
    size = config.policy.generation.engine.size
    return None if size is None else size(config)


def has_engine_beside(config: MasterConfig) -> bool:
    """Return whether engines of a known size run on the trainer's GPUs."""
    return engine_size(config) is not None and engines_share_gpus(config)


def moment_lines(
    config: MasterConfig, transformer: TransformerConfig, hf_config: Any, target: Target | None = None
) -> list[str]:
    """Return lines on the memory that trainer, engine and processes use on the fullest GPU, at each moment of a
    step."""
    size = _GPU_SIZES_GB[0] if target is None else target.card.memory_gb
    found = moments_of_the_fullest(config, transformer, hf_config, size * UNITS["GB"])
    heads = ["trainer", "engine", "processes", "sum"]
    rows = [(moment.event, (moment.trainer, moment.engine, moment.processes, moment.total)) for moment in found]
    most = fullest(found)
    marks = ["", *("  <- the peak" if moment is most else "" for moment in found)]
    lines = [line + mark for line, mark in zip(table(heads, rows, "GB"), marks, strict=True)]
    estimates = (
        f"  estimates: CUDA's context and NCCL, {PROCESS_BYTES / UNITS['GB']:g} GB a process; other memory that an"
        f" engine keeps while it sleeps, {KEPT_BYTES / UNITS['GB']:g} GB"
    )
    return [f"Memory of a GPU with {size} GB at each moment, at least, in GB:", *lines, estimates]


@dataclass(frozen=True)
class Fit:
    """Whether a run fits its GPUs.

    Attributes:
        moment: The fullest moment of the fullest GPU.
        memory: Bytes of a GPU.
        engines_lack_room: Whether an engine's weights and a cache are more than its share.
    """

    moment: Entry
    memory: int
    engines_lack_room: bool

    @property
    def is_fitting(self) -> bool:
        return self.moment.total <= self.memory and not self.engines_lack_room

    def __str__(self) -> str:
        return f"{self.moment.total / UNITS['GB']:.2f} of {self.memory / UNITS['GB']:g} GB"


def fit_of(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, target: Target) -> Fit:
    """Return whether the run fits the target's GPUs at its fullest moment."""
    memory = target.card.memory_gb * UNITS["GB"]
    moment = fullest(moments_of_the_fullest(config, transformer, hf_config, memory))
    return Fit(moment, memory, _engines_lack_room(config, transformer, hf_config, memory))


def fit_line(fit: Fit, target: Target) -> str:
    """Return the line that states whether the run fits the target's GPUs, and how much memory remains."""
    of_it = f"the {target.card.memory_gb} GB of each {target.card.name}"
    needed = f"{fit.moment.total / UNITS['GB']:.2f} GB {fit.moment.event}"
    if fit.moment.total > fit.memory:
        return f"{target}: does not fit: {needed} are more than {of_it}"
    if fit.engines_lack_room:
        return f"{target}: does not fit: an engine's weights and a cache are more than its share of {of_it}"
    return f"{target}: fits, with {1 - fit.moment.total / fit.memory:.0%} of {of_it} to spare: {needed}"


def moments_of_the_fullest(
    config: MasterConfig, transformer: TransformerConfig, hf_config: Any, memory: int
) -> list[Entry]:
    """Return the moments of the pipeline stage whose GPUs are the fullest, for GPUs with `memory` bytes."""
    size = engine_size(config)
    engine = None if size is None else _engine_share(config, transformer, hf_config, int(size.largest_share * memory))
    by_stage = [moments(worker, engine) for worker in _workers(config, transformer, hf_config)]
    return max(by_stage, key=lambda found: fullest(found).total)


def _engine_share(
    config: MasterConfig, transformer: TransformerConfig, hf_config: Any, share: int
) -> EngineShare | None:
    """Return the memory of an engine's rank on a GPU of the trainer, or None if engines do not use the trainer's GPUs.
    `share` is the number of bytes that the rank may use."""
    size = engine_size(config)
    if size is None or not engines_share_gpus(config):
        return None
    assert isinstance(config, GRPOMasterConfig)  # other configurations have no engines
    memory = engine_memory(size, transformer, hf_config)
    return EngineShare(memory, share, refit_bytes(config, transformer, memory))


def _workers(config: MasterConfig, transformer: TransformerConfig, hf_config: Any) -> list[WorkerMemory]:
    stages = range(transformer.pipeline_model_parallel_size)
    return [worker_memory(config, transformer, hf_config, stage) for stage in stages]


def _engines_lack_room(config: MasterConfig, transformer: TransformerConfig, hf_config: Any, memory: int) -> bool:
    size = engine_size(config)
    if size is None:
        return False
    return engine_memory(size, transformer, hf_config).cache(memory, size.largest_share) <= 0


def engine_lines(
    config: MasterConfig, transformer: TransformerConfig, hf_config: Any, target: Target | None = None
) -> list[str]:
    """Return lines on the engines: their number and memory, and the memory of the trainer on their GPUs. Empty if the
    engines' size is unknown."""
    size = engine_size(config)
    if size is None:
        return []
    assert isinstance(config, GRPOMasterConfig)  # other configurations have no engines
    engine, longest = config.policy.generation.engine, config.policy.max_total_sequence_length
    section = f"policy.generation.{engine.name}"
    memory = engine_memory(size, transformer, hf_config)
    on_the_way = bytes_on_the_way(config, transformer, hf_config)
    on_gpus = config.cluster.gpus_per_node > 0
    workers = _workers(config, transformer, hf_config)
    unit = unit_for(worker.peak_at_least for worker in workers)

    def shown(value: float) -> str:
        return f"{value / UNITS[unit]:.2f}"

    gpus = f", of {size.ranks} {'GPU' if size.ranks == 1 else 'GPUs'} each" if on_gpus else ""
    rows = [
        ("engines", f"{size.num_copies}{gpus}"),
        (f"weights of each rank ({size.dtype})", shown(memory.weights)),
        (f"key-value cache of a sequence, {longest} tokens", shown(memory.cache_of_a_token * longest)),
    ]
    if on_gpus:
        if size.gpu_memory_utilization is not None:
            share = f"a GPU's share for its engine ({section}.gpu_memory_utilization)"
            rows.append((share, f"{size.gpu_memory_utilization:g}"))
        engine_share = _engine_share(config, transformer, hf_config, 0)
        rows += _device_rows(size.largest_share, memory, engine_share, workers, longest, target)
    elif size.cpu_cache_bytes is not None:
        rows.append((f"key-value cache of each engine ({section}.cpu_cache_gib)", shown(size.cpu_cache_bytes)))
    if config.policy.generation.weight_transport not in ON_DEVICE:
        where = "shared memory" if config.cluster.num_nodes == 1 else "checkpointing.checkpoint_dir"
        rows.append((f"in {where} while weights are sent, at most", shown(on_the_way)))
    heading = f"Engines of {engine.title or engine.name}, by arithmetic, in {unit} of {UNITS[unit]:,} bytes:"
    return ["", heading, *aligned(rows), "  not counted: the engines' activations and buffers"]


def _device_rows(
    utilization: float,
    memory: EngineMemory,
    beside: EngineShare | None,
    workers: Sequence[WorkerMemory],
    longest: int,
    target: Target | None,
) -> list[tuple[str, str]]:
    """Return rows on the memory of an engine's GPU, in GB. `beside` is the engine's rank if it uses GPUs of the
    trainer's ranks `workers`."""
    rows = []
    least = memory.fits_from(0, utilization)
    if beside is not None:
        least = max(smallest_device(worker, beside, utilization) for worker in workers)
        held = max(worker.while_generating for worker in workers)
        rows += [
            ("held by the trainer while the engine generates, in GB", f"{held / UNITS['GB']:.2f}"),
            ("kept while the engine sleeps, an estimate, in GB", f"{(PROCESS_BYTES + KEPT_BYTES) / UNITS['GB']:.2f}"),
            ("smallest GPU on which both fit, in GB", f"{least / 1e9:.0f}" if math.isfinite(least) else "none"),
        ]
    for size in _GPU_SIZES_GB if target is None else (target.card.memory_gb,):
        cache = memory.cache(size * UNITS["GB"], utilization)
        fits = size * UNITS["GB"] >= least and cache > 0
        sequences = f", {cache // (memory.cache_of_a_token * longest):,} such sequences"
        value = f"{cache / UNITS['GB']:.2f}{sequences}" if fits else "they do not fit"
        rows.append((f"GPUs with {size} GB: key-value cache, in GB", value))
    return rows


def unit_for(totals: Iterable[int]) -> str:
    """Return the unit of a plan's tables: GB, or MB if all of the totals (in bytes) are below 1 GB."""
    return "GB" if max(totals) >= UNITS["GB"] else "MB"


def table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[int]]], unit: str) -> list[str]:
    """Return a table as lines: the heads of the columns, then the label and values of each row. Values are bytes, shown
    in `unit`."""
    cells = [heads, *([f"{value / UNITS[unit]:.2f}" for value in values] for _, values in rows)]
    label_width = max(len(label) for label, _ in rows)
    width = max(len(cell) for row in cells for cell in row)
    return [
        f"  {label:<{label_width}}  " + "  ".join(f"{cell:>{width}}" for cell in row)
        for label, row in zip(["", *(label for label, _ in rows)], cells, strict=True)
    ]


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each row of label and value, with the values aligned."""
    width = max(len(label) for label, _ in rows)
    return [f"  {label:<{width}}  {value}" for label, value in rows]

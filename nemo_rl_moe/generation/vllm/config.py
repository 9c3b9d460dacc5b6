# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `policy.generation.vllm`, and its rules. Imports no torch."""

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Literal

from nemo_rl_moe.config.schema_base import PositiveInt, Processes, Seconds, Share, StrictModel
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.generation.places import other_kind_of_device

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig

KEY = "policy.generation.vllm"
PrefixCaching = Literal["none", "reset", "keep"]


class VllmConfig(StrictModel):
    """Settings of the engines of `backend: vllm`."""

    num_engines: PositiveInt | None
    """Number of engines. They share the prompts. null: number of GPUs over `tensor_parallel_size`, or 1 on CPUs."""
    tensor_parallel_size: PositiveInt
    """Number of GPUs of one engine; 1 on CPUs."""
    expert_parallel: bool
    """Whether to distribute the experts over the engine's GPUs instead of sharding each expert."""
    dtype: Literal["float32", "bfloat16", "float16"] | None
    """Number format of the engines' weights; null: `policy.precision`."""
    gpu_memory_utilization: Share
    """Share of a GPU's memory that an engine may take while it generates. The trainer's memory comes on top."""
    cpu_cache_gib: PositiveInt
    """Key-value cache of each engine on CPUs, in GiB."""
    cpu_threads: Processes
    """Number of threads of each engine on CPUs."""
    prefix_caching: PrefixCaching
    """Keys and values of common prefixes, such as a group's prompt. `none` computes them for each request. `reset`
    computes them once for each version of the weights. `keep` still uses old ones after an update."""
    start_timeout_s: Seconds
    """Seconds within which the engines must be ready."""
    stall_timeout_s: Seconds
    """Seconds without a step after which a generating engine is given up and replaced."""


def section_of(config: "GRPOMasterConfig") -> VllmConfig:
    return config.policy.generation.section_of(VllmConfig)


def engines_have_places(config: "GRPOMasterConfig") -> Iterator[str]:
    """Yield a problem if an engine does not fit on one machine, or if two would share a GPU."""
    engines = section_of(config)
    has_own = GENERATION_ROLE in config.cluster.roles
    place = config.cluster.place_of(GENERATION_ROLE) if has_own else config.cluster
    section = f"cluster.roles.{GENERATION_ROLE}" if has_own else "cluster"
    size, gpus = engines.tensor_parallel_size, place.gpus_per_node
    if (problem := other_kind_of_device(config)) is not None:
        yield problem
    elif gpus == 0:
        if size > 1:
            yield f"{KEY}.tensor_parallel_size: got {size}, expected 1 on CPUs ({section}.gpus_per_node 0)"
        if has_own and (engines.num_engines or 0) > place.world_size:
            yield (
                f"{KEY}.num_engines: got {engines.num_engines}, expected at most {place.world_size}:"
                f" {section}.num_nodes {place.num_nodes} x {section}.cpu_workers_per_node {place.workers_per_node}"
            )
    elif gpus % size:
        below = max(divisor for divisor in range(1, min(gpus, size) + 1) if gcd(gpus, divisor) == divisor)
        yield (
            f"{KEY}.tensor_parallel_size: got {size}, expected a divisor of {section}.gpus_per_node {gpus}; nearest"
            f" below: {below}"
        )
    elif (engines.num_engines or 0) > (places := place.num_nodes * gpus // size):
        yield (
            f"{KEY}.num_engines: got {engines.num_engines}, expected at most {places}: {section}.num_nodes"
            f" {place.num_nodes} x {section}.gpus_per_node {gpus} / {KEY}.tensor_parallel_size {size}"
        )
    if engines.expert_parallel and size == 1:
        yield (
            f"{KEY}.expert_parallel: got true, expected false with {KEY}.tensor_parallel_size 1: a single"
            " GPU has all experts"
        )


def prefix_cache_fits(config: "GRPOMasterConfig") -> Iterator[str]:
    """Yield a problem for each setting that is not compatible with the chosen `prefix_caching`.

    With captured routes only `none` is allowed. `keep` requires asynchronous rollouts and importance-sampling
    correction.
    """
    chosen, key = section_of(config).prefix_caching, f"{KEY}.prefix_caching"
    if chosen == "none":
        return
    if captures_routes(config):
        yield (
            f"{key}: got {chosen!r}, expected 'none' if policy.megatron_cfg.capture_routing is true or routing_replay"
            " is rollout: tokens from the cache are not computed again, and have no routed experts"
        )
    if chosen == "keep" and not config.grpo.rollouts.is_asynchronous:
        yield (
            f"{key}: got 'keep', expected 'reset' with grpo.rollouts.mode synchronous: no response continues after an"
            " update"
        )
    if chosen == "keep" and config.loss_fn.importance_sampling_correction == "none":
        yield (
            f"{key}: got 'keep', expected 'reset' with loss_fn.importance_sampling_correction none: without the"
            " correction, tokens sampled from keys and values of old weights would count in full"
        )


def captures_routes(config: "GRPOMasterConfig") -> bool:
    """Return whether engines capture routed experts.

    On GPUs they do so only for replay, because captured routes exclude a prefix cache.
    """
    megatron, on_gpus = config.policy.megatron_cfg, config.cluster.gpus_per_node > 0
    return megatron.routing_replay == "rollout" or (megatron.capture_routing and not on_gpus)

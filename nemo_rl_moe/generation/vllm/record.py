# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of the engine vLLM. Imports no torch: functions that need it import it when called."""

from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.engine import Engine, EngineSize
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.vllm.adapter_rules import adapters_can_be_served, delivered_adapters, target_problem
from nemo_rl_moe.generation.vllm.config import (
    VllmConfig,
    captures_routes,
    engines_have_places,
    prefix_cache_fits,
    section_of,
)

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import GRPOMasterConfig
    from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this."""


def number_format(policy: "GeneratingPolicyConfig") -> str:
    return policy.generation.section_of(VllmConfig).dtype or policy.precision


def size(config: "GRPOMasterConfig") -> EngineSize:
    """Return number and size of the engines. The default number fills all GPUs, and is 1 on CPUs."""
    chosen, cluster = section_of(config), config.cluster
    places = cluster.gpus_per_node // chosen.tensor_parallel_size * cluster.num_nodes if cluster.gpus_per_node else 1
    return EngineSize(
        num_copies=chosen.num_engines or places,
        ranks=chosen.tensor_parallel_size,
        dtype=number_format(config.policy),
        gpu_memory_utilization=chosen.gpu_memory_utilization,
        cpu_cache_bytes=chosen.cpu_cache_gib * 2**30,
        vocabulary_multiple=VOCABULARY_MULTIPLE,
    )


def check_installation(config: "GRPOMasterConfig") -> None:
    """Check that a supported release for the run's devices is installed."""
    from nemo_rl_moe.generation.vllm import releases

    releases.check_installation(on_gpus=config.cluster.gpus_per_node > 0)


def check_model(config: "GRPOMasterConfig", hf_config: Any) -> None:
    """Check that vLLM can build the model, and apply adapters to it if it gets any."""
    from nemo_rl_moe.generation.vllm import releases

    releases.check_model(
        hf_config,
        config.policy.model_name,
        on_gpus=config.cluster.gpus_per_node > 0,
        tensor_parallel_size=section_of(config).tensor_parallel_size,
        dtype=number_format(config.policy),
        prefix_caching=section_of(config).prefix_caching,
    )
    lora = delivered_adapters(config.policy)
    if lora is not None and (problem := target_problem(lora, hf_config, config.policy.model_name)) is not None:
        raise ConfigurationError(problem)


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    make="nemo_rl_moe.generation.vllm.engine:make_vllm_engine",
    config_class=VllmConfig,
    rules=(engines_have_places, prefix_cache_fits, adapters_can_be_served),
    size=size,
    check_installation=check_installation,
    check_model=check_model,
    number_format=number_format,
    captures_routes=captures_routes,
    takes_adapters=True,
    lacks_base=True,
)

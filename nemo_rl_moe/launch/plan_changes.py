# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of a configuration whose plan does not fit its GPUs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.files import exemplar_names, find_config, read_with_defaults
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.schema import MasterConfig, engines_share_gpus
from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.distributed.accelerators import Target
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.plan_gpus import Fit, engine_size, fit_of
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model.planned_machine import planned_with_gpus
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

Overrides = Sequence[str]
_MEGATRON = "policy.megatron_cfg"
_MOST_LINES = 3


def single_changes(config: MasterConfig) -> Iterator[list[Overrides]]:
    """Yield the values of each setting that usually saves memory, as overrides. The first values cost the least."""
    generates, size = generating(config.policy), engine_size(config)
    if generates is not None and not generates.offload_optimizer_for_generation:
        yield [["policy.offload_optimizer_for_generation=true"]]
    if generates is not None and size is not None and size.gpu_memory_utilization and engines_share_gpus(config):
        key, share = f"policy.generation.{generates.generation.backend}.gpu_memory_utilization", size.largest_share
        tenths = (tenth / 10 for tenth in range(1, 10))
        yield [[f"{key}={tenth}"] for tenth in sorted(tenths, key=lambda tenth: abs(tenth - share))]
    megatron, world = config.policy.megatron_cfg, config.cluster.world_size
    experts = megatron.expert_model_parallel_size
    larger = [number for number in range(experts + 1, world + 1) if world % number == 0]
    yield [[f"{_MEGATRON}.expert_model_parallel_size={number}"] for number in larger]
    optimizer = f"{_MEGATRON}.optimizer"
    aware, moments = f"{optimizer}.use_precision_aware_optimizer=true", ("exp_avg_dtype", "exp_avg_sq_dtype")
    yield [[aware, *(f"{optimizer}.{name}=bfloat16" for name in moments)]]
    if not megatron.optimizer.optimizer_cpu_offload:
        needed = [f"{optimizer}.{name}=float32" for name in moments if getattr(megatron.optimizer, name) != "float32"]
        yield [[aware, *needed, f"{optimizer}.optimizer_cpu_offload=true"]]


def change_lines(
    config: MasterConfig, fit: Fit, target: Target, load: Callable[[Overrides], MasterConfig]
) -> Iterator[str]:
    """Yield lines on changes with which a run that does not fit the target would fit.

    If no single change suffices, the lines have the nearest change, and the shipped configurations of the same
    model and algorithm that fit.

    Args:
        fit: How the run fits without changes.
        load: Function that loads the configuration with further overrides.
    """
    tried: list[tuple[Fit, str]] = []
    for values in single_changes(config):
        for change in values:
            if (found := _fit(partial(load, change), target)) is not None:
                tried.append((found, " ".join(change)))
                if found.is_fitting:
                    break
    fitting = [f"fits with {change} ({found})" for found, change in tried if found.is_fitting]
    if fitting:
        yield from fitting[:_MOST_LINES]
        return
    better = [each for each in tried if each[0].moment.total < fit.moment.total]
    if better and fit.moment.total > fit.memory:
        found, change = min(better, key=lambda each: each[0].moment.total)
        yield f"no single change fits; the nearest is {change} ({found})"
    recipes = ((name, _fit_of_recipe(name, config, target)) for name in exemplar_names())
    alike = [f"{name} ({found})" for name, found in recipes if found is not None and found.is_fitting]
    if alike:
        yield f"shipped configurations of the model that fit: {', '.join(alike[:_MOST_LINES])}"


def _fit_of_recipe(name: str, config: MasterConfig, target: Target) -> Fit | None:
    """Return how a shipped configuration fits if it has the model and the algorithm and needs no further machines."""
    model = read_with_defaults(find_config(name)).get("policy", {}).get("model_name")
    if not isinstance(model, str) or Path(model).name != Path(config.policy.model_name).name:
        return None

    def is_alike(recipe: MasterConfig) -> bool:
        needs_no_more = recipe.cluster.roles.keys() <= config.cluster.roles.keys()
        return needs_no_more and algorithm_of(recipe) is algorithm_of(config)

    words = [f"policy.model_name={config.policy.model_name}", *target.overrides]
    return _fit(partial(load_any_config, name, words, check_paths=False), target, is_alike)


def _fit(
    load: Callable[[], MasterConfig], target: Target, is_wanted: Callable[[MasterConfig], bool] = lambda config: True
) -> Fit | None:
    """Return how a configuration fits the target, or None if a run would refuse it or it is not wanted."""
    with suppress(ConfigurationError):
        config = load()
        if is_wanted(config):
            hf_config = load_hf_config(config.policy.model_name)
            with planned_with_gpus():
                transformer = build_transformer_config(config.policy, hf_config)
                return fit_of(config, transformer, hf_config, target)
    return None

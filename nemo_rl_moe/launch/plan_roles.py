# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Lines of a plan on roles, the models other than the policy in separate workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.config.algorithm import roles_of
from nemo_rl_moe.config.role_keys import role_problems
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_policy import RoleModelConfig, TrainedRoleConfig
from nemo_rl_moe.distributed.accelerators import Target
from nemo_rl_moe.errors import ConfigurationError, counted
from nemo_rl_moe.launch.plan_gpus import UNITS, table, unit_for
from nemo_rl_moe.launch.roles import role_as_policy
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model.memory_estimate import worker_memory
from nemo_rl_moe.models.megatron.model.memory_moments import PROCESS_BYTES
from nemo_rl_moe.models.megatron.model.transformer_config import TransformerConfig, build_transformer_config


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that each worker of a role always holds, calculated for the fullest pipeline stage.

    Attributes:
        gradients: 0 if the role does not train.
        optimizer: 0 if the role does not train.
        process: An estimate for CUDA's context and NCCL, 0 on CPUs.
    """

    label: str
    weights: int
    gradients: int
    optimizer: int
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.process


def role_memories(config: MasterConfig) -> dict[str, RoleMemory]:
    """Role -> memory of each of its workers."""
    return {name: _role_memory(config, name, role) for name, role in roles_of(config).items()}


def role_transformer(config: MasterConfig, name: str, role: RoleModelConfig) -> tuple[Any, TransformerConfig]:
    """Return the configuration of a role's model and its TransformerConfig. Errors name the role's keys."""
    try:
        hf_config = load_hf_config(role.model_name)
        return hf_config, build_transformer_config(role_as_policy(config, name), hf_config)
    except ConfigurationError as error:
        raise ConfigurationError(role_problems(config, name, error.problems)) from error


def _role_memory(config: MasterConfig, name: str, role: RoleModelConfig) -> RoleMemory:
    place = config.cluster.place_of(name)
    alone = config.model_copy(update={"policy": role_as_policy(config, name), "cluster": place})
    hf_config, transformer = role_transformer(config, name, role)
    stages = range(transformer.pipeline_model_parallel_size)
    workers = [worker_memory(alone, transformer, hf_config, stage) for stage in stages]
    trains = isinstance(role, TrainedRoleConfig)
    held = max(workers, key=lambda worker: worker.always if trains else worker.weights)
    return RoleMemory(
        f"{name}: {role.model_name}, {counted(place.world_size, 'worker')}",
        held.weights,
        held.gradients if trains else 0,
        held.optimizer.state if trains else 0,
        PROCESS_BYTES if place.gpus_per_node else 0,
    )


def role_lines(memories: dict[str, RoleMemory], target: Target | None) -> Iterator[str]:
    """Yield the lines of a table of the roles, and lines that state whether each role fits the target's GPUs."""
    if not memories:
        return
    found = memories.values()
    unit = unit_for(each.total for each in found)
    heads = ["weights", "gradients", "optimizer", "process", "sum"]
    rows = [(each.label, (each.weights, each.gradients, each.optimizer, each.process, each.total)) for each in found]
    yield f"Memory of each worker beside the policy, held all the time, in {unit} of {UNITS[unit]:,} bytes:"
    yield from table(heads, rows, unit)
    yield "  not counted: their activations"
    if target is None:
        return
    for name, each in memories.items():
        memory = target.card.memory_gb * UNITS["GB"]
        verdict = "fits" if each.total <= memory else "does not fit"
        yield f"  {target}: {name} {verdict}: {each.total / UNITS['GB']:.2f} of {target.card.memory_gb} GB"

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The machines and GPUs of vLLM's engines."""

from dataclasses import dataclass
from typing import Any

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_moe.distributed.cluster import RayCluster


@dataclass(frozen=True)
class Placement:
    """Machines and GPUs of engines. If the engines share them with the trainer, engines and trainer alternate."""

    cluster: RayCluster
    gpus_per_engine: int
    is_shared: bool = True

    @property
    def engines_per_machine(self) -> int:
        """Number of engines that a machine's GPUs hold. On CPUs 1 if shared with the trainer, else one per worker."""
        if self.gpus_per_engine:
            return self.cluster.config.gpus_per_node // self.gpus_per_engine
        return 1 if self.is_shared else self.cluster.config.workers_per_node

    @property
    def num_engines(self) -> int:
        """Number of engines that all machines hold. On CPUs that are shared with the trainer, 1 in total."""
        is_one = self.is_shared and not self.gpus_per_engine
        return 1 if is_one else self.engines_per_machine * self.cluster.config.num_nodes

    def options(self, number: int) -> dict[str, Any]:
        machine = number // self.engines_per_machine % self.cluster.config.num_nodes
        strategy = PlacementGroupSchedulingStrategy(self.cluster.placement_group, placement_group_bundle_index=machine)
        resources = {"num_cpus": 0, "num_gpus": 0}
        if not self.is_shared:
            resources = {"num_cpus": max(1, self.gpus_per_engine), "num_gpus": self.gpus_per_engine}
        return {**resources, "scheduling_strategy": strategy}

    def gpus(self, number: int) -> tuple[int, ...]:
        """Return the indices, on its machine, of the GPUs that engine `number` shares with the trainer, if any."""
        if not self.is_shared:
            return ()
        first = number % self.engines_per_machine * self.gpus_per_engine
        return tuple(range(first, first + self.gpus_per_engine))

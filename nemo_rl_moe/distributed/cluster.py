# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a run, local or joined, with reserved resources for every worker."""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_moe.config.schema_run import ClusterConfig
from nemo_rl_moe.distributed.local_ray import LocalRay, preserved_handlers
from nemo_rl_moe.distributed.node_tools import chosen_threads, usable_cores
from nemo_rl_moe.distributed.usable_gpus import problem_with_gpus
from nemo_rl_moe.errors import ConfigurationError, WorkerDiedError, counted

JOIN_TIMEOUT_S = 10.0


def node_resources(config: ClusterConfig) -> dict[str, float]:
    """Return the resources to reserve on each machine, by Ray's names: a CPU and a GPU per worker."""
    resources = {"CPU": float(config.workers_per_node)}
    return resources | {"GPU": float(config.gpus_per_node)} if config.gpus_per_node else resources


def describe_shortage(config: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a line for each resource that the cluster lacks for a run.

    Args:
        nodes: Resources of each live node, by Ray's names.
    """
    if len(nodes) < config.num_nodes:
        return [
            f"cluster.num_nodes: got {config.num_nodes}, the Ray cluster has {len(nodes)};"
            f" nearest: cluster.num_nodes={len(nodes)}"
        ]
    gpus, cpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("GPU", "CPU"))
    on_nodes = f" on each of {config.num_nodes} nodes" if config.num_nodes > 1 else " on one node"
    if config.gpus_per_node:
        if (most := _most_on_each(gpus, config.num_nodes)) < config.gpus_per_node:
            nearest = _ON_CPUS if most == 0 else f"cluster.gpus_per_node={most}"
            asked_for = counted(config.gpus_per_node, "GPU")
            return [
                f"cluster.gpus_per_node: asked for {asked_for}{on_nodes}, the Ray cluster has {_by_node(gpus)};"
                f" nearest: {nearest}"
            ]
        key = "cluster.gpus_per_node"
    else:
        key = "cluster.cpu_workers_per_node"
    if (most := _most_on_each(cpus, config.num_nodes)) < config.workers_per_node:
        return [
            f"{key}: {config.workers_per_node} workers{on_nodes} need a CPU each, the Ray cluster has"
            f" {_by_node(cpus)}; nearest: {key}={most}"
        ]
    return []


_ON_CPUS = (
    "cluster.gpus_per_node=0, which trains on CPUs, with parallel sizes of policy.megatron_cfg, such as"
    " expert_model_parallel_size, that divide cluster.cpu_workers_per_node"
)


def _most_on_each(amounts: Sequence[int], num_nodes: int) -> int:
    """Return the largest amount that at least `num_nodes` nodes have."""
    return sorted(amounts, reverse=True)[num_nodes - 1]


def _by_node(amounts: Sequence[int]) -> str:
    return str(amounts[0]) if len(amounts) == 1 else f"{', '.join(map(str, amounts))} on its {len(amounts)} nodes"


class RayCluster:
    """Machines of a run, with reserved resources for every worker.

    Uses the Ray that this process is connected to, joins the cluster of RAY_ADDRESS ("host:port" or "auto"), or starts
    a local Ray. Ray reserves the resources as a placement group with one bundle on each machine.

    Args:
        beside: Cluster of the policy, if the new cluster is for another role. Requires that the new cluster is shut
            down before the policy's.
        stored_bytes: Number of bytes in a local Ray's object store besides batches and metrics.
        placement_timeout_s: Seconds to wait for other jobs to free resources.

    Attributes:
        is_local: Whether all workers run on this machine.
        num_threads: Number of threads of each worker, from the user's `OMP_NUM_THREADS`. None if that is not set.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        beside: "RayCluster | None" = None,
        stored_bytes: int = 0,
        placement_timeout_s: float = 60.0,
    ):
        self.config = config
        self._stored_bytes = stored_bytes
        self.num_threads = chosen_threads(os.environ)
        self._beside = beside
        self.placement_group: PlacementGroup | None = None
        self.started_processes: list[Any] = []
        self._has_joined = False
        self._local_ray: LocalRay | None = None
        try:
            self._connect()
            nodes = [node for node in ray.nodes() if node["Alive"]]
            if problems := describe_shortage(config, [node["Resources"] for node in nodes]):
                raise ConfigurationError(problems)
            self.is_local = config.num_nodes == 1 and len(nodes) == 1
            self._reserve(placement_timeout_s)
            if config.gpus_per_node:
                self._require_usable_gpus()
        except BaseException:
            self.shutdown()
            raise

    @property
    def failure(self) -> str | None:
        """Error message if one of the local Ray's servers has died, otherwise None."""
        if self._beside is not None:
            return self._beside.failure
        return self._local_ray.failure if self._local_ray else None

    @property
    def can_be_called(self) -> bool:
        """Whether Ray runs. If it was stopped or its servers have died, a call could wait forever."""
        return ray.is_initialized() and self.failure is None

    def call_on_each_machine(self, function: Callable[..., Any], *args: Any, with_gpus: bool = False) -> list[Any]:
        """Call a function once on every machine of the run, each in a separate process. Return the results.

        Args:
            with_gpus: Whether the process gets all GPUs of the run on its machine. Requires that no worker holds
                them.
        """
        calls = []
        for bundle in range(self.config.num_nodes):
            strategy = PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=bundle)
            task = ray.remote(function).options(
                num_cpus=0,
                num_gpus=self.config.gpus_per_node if with_gpus else 0,
                max_retries=0,
                scheduling_strategy=strategy,
            )
            calls.append(task.remote(*args))
        try:
            return list(ray.get(calls))
        except RayError as error:
            raise WorkerDiedError(f"`{function.__name__}` on the machines of the run: {error}") from error

    def let_die(self) -> None:
        """Mark Ray as unneeded, so that its death is not a failure of the run."""
        if self._local_ray:
            self._local_ray.let_die()

    def shutdown(self) -> None:
        """Release the reserved resources, and stop Ray if this object started it. Do nothing the second time."""
        if self.failure is not None:
            return  # Ray would not answer
        if self.placement_group is not None and ray.is_initialized():
            remove_placement_group(self.placement_group)
        self.placement_group = None
        if self._local_ray:
            self._local_ray.shutdown()
        elif self._has_joined:
            ray.shutdown()
        self._local_ray, self._has_joined = None, False

    def _require_usable_gpus(self) -> None:
        """Raise an error if torch cannot use the GPUs. Otherwise Megatron-Core's workers would silently run on CPUs."""
        problems = [problem for problem in self.call_on_each_machine(problem_with_gpus, with_gpus=True) if problem]
        if problems:
            raise ConfigurationError(problems)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Workers without a GPU hide the GPUs themselves. This keeps Ray from a warning about how it hides them.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = os.environ.get("RAY_ADDRESS", "")
        # Workers print into Ray's log files. If one fails, its error and the end of its log are shown.
        if address in ("", "local"):
            self._start_local()
        elif address.startswith("ray://"):
            raise ConfigurationError(
                f"RAY_ADDRESS: got {address}, expected host:port or auto; Ray's client protocol (ray://) is not"
                " supported, start the run on a node of the cluster"
            )
        else:
            self._join(address)

    def _join(self, address: str) -> None:
        try:
            if address != "auto":
                # Ray itself would only report a wrong address after minutes.
                host, separator, port = address.rpartition(":")
                if not separator or not port.isdigit():
                    raise ValueError("expected host:port or auto")
                socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_TIMEOUT_S).close()
            with preserved_handlers():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigurationError(
                f"RAY_ADDRESS: cannot join a Ray cluster at {address} ({reason}); unset it to use this machine only"
            ) from error
        self._has_joined = True

    def _start_local(self) -> None:
        if self.config.num_nodes > 1:
            raise ConfigurationError(
                f"cluster.num_nodes: got {self.config.num_nodes}, but without RAY_ADDRESS a run has only this machine:"
                " set cluster.num_nodes=1, or start Ray on all machines (ray start) and set RAY_ADDRESS"
            )
        # Ray's CPUs are logical. More workers than cores take turns.
        num_cpus = max(usable_cores(), self.config.all_workers_per_node)
        self._local_ray = LocalRay(num_cpus, self._stored_bytes)

    def _reserve(self, timeout_s: float) -> None:
        # One bundle per machine, so that every machine gets its number of workers.
        resources = node_resources(self.config)
        self.placement_group = placement_group([resources] * self.config.num_nodes, strategy="STRICT_SPREAD")
        if self.placement_group.wait(timeout_seconds=timeout_s):
            return
        free = ray.available_resources()
        raise ConfigurationError(
            f"cluster: the Ray cluster is large enough, but busy: waited {timeout_s:g} s for {self.config.num_nodes} x"
            f" {_amounts(resources)}; free now: {_amounts(free)}. Wait for its other jobs, or ask for less"
        )


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{int(resources.get(kind, 0))} {kind}s" for kind in ("CPU", "GPU") if kind in resources) or "0"

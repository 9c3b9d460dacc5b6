# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A Ray of this process's own: started out of reach of signals meant for the program, and ended at once."""

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_moe.distributed.head_watch import HeadWatch, LocalHead, RemoteHead, knock
from nemo_rl_moe.distributed.node_tools import ProcessIdentity, end_processes, usable_cores
from nemo_rl_moe.errors import ConfigurationError, WorkerDiedError

LARGEST_OBJECT_STORE_BYTES = 512 * 1024**2
SMALLEST_OBJECT_STORE_BYTES = 80 * 1024**2
SHARED_MEMORY = "/dev/shm"


def object_store_bytes() -> int:
    """A small object store: batches and metrics are all that travels. Less where shared memory is scarce."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        free = LARGEST_OBJECT_STORE_BYTES
    return max(SMALLEST_OBJECT_STORE_BYTES, min(LARGEST_OBJECT_STORE_BYTES, int(0.8 * free)))


@contextmanager
def kept_in_its_place() -> Iterator[None]:
    """Lets `ray.init` run without taking over what is the program's: its handling of SIGTERM, and its output.

    Ray prints pages of its servers' logs when a worker or a server dies. What is to be known of it stands in the errors
    that the driver gets.
    """
    worker_module = ray._private.worker
    if hasattr(worker_module, "print_to_stdstream"):
        worker_module.print_to_stdstream = lambda *args, **options: None
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


class LocalRay:
    """Ray's servers as children of this process.

    Args:
        num_cpus: What Ray offers to workers.

    Attributes:
        watch: Looks after the servers.

    Raises:
        WorkerDiedError: They do not start; nothing of them is left.
    """

    def __init__(self, num_cpus: int):
        self._head = LocalHead({ProcessIdentity.of(child) for child in psutil.Process().children()})
        self.watch = HeadWatch(self._head)
        try:
            with kept_in_its_place(), _signals_held_back():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=object_store_bytes(),
                    # Ray gives its workers the lowest priority but four; here they are the program itself.
                    _system_config={"worker_niceness": 0},
                )
        except Exception as error:
            problem = self.watch.failure
            self.watch.stop()
            # Ray leaves the servers that did start to the end of this process.
            self._head.bury()
            raise WorkerDiedError(f"Ray could not be started on this machine: {problem or error}") from error
        self._head.note_all_started()

    def shutdown(self) -> None:
        """Ends the servers and all that hangs on them."""
        self.watch.stop()
        family = self._head.family()
        _kill_without_waiting()
        ray.shutdown()
        end_processes(family, grace_s=0.0)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Whatever is started here never gets SIGTERM.

    Batch systems signal every process of a job: Ray's servers would be gone before the run has saved. Nor do the
    threads that Ray starts in this process get signals meant for the main one.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _kill_without_waiting() -> None:
    """Spares Ray the second that it waits for each server to follow SIGTERM, which is held back from them."""
    node = getattr(ray._private.worker, "_global_node", None)
    kill = getattr(node, "kill_all_processes", None)
    if node is None or kill is None:
        return

    def kill_at_once(check_alive: bool = True, allow_graceful: bool = False, **options: Any) -> Any:
        del allow_graceful
        return kill(check_alive=check_alive, allow_graceful=False, **options)

    node.kill_all_processes = kill_at_once


JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ClusterRequest:
    """What a run asks for, as the `cluster` section of the configuration says it.

    Attributes:
        num_nodes: Machines.
        gpus_per_node: GPUs on each, one worker a GPU; 0 trains on CPUs.
        cpu_workers_per_node: Workers on each when there are no GPUs.
    """

    num_nodes: int
    gpus_per_node: int
    cpu_workers_per_node: int

    @property
    def workers_per_node(self) -> int:
        """Worker processes on each machine."""
        return self.gpus_per_node or self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Worker processes in all."""
        return self.num_nodes * self.workers_per_node

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves on each machine: one CPU a worker, and its GPU."""
        resources = {"CPU": float(self.workers_per_node)}
        return resources | {"GPU": float(self.gpus_per_node)} if self.gpus_per_node else resources


def describe_shortage(request: ClusterRequest, nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """What a cluster lacks.

    Args:
        request: What the run asks for.
        nodes: The resources of each node that is alive, by Ray's names.

    Returns:
        One line for each thing that is missing; none when the run fits.
    """
    if len(nodes) < request.num_nodes:
        return [
            f"cluster.num_nodes: got {request.num_nodes}, the Ray cluster has {len(nodes)};"
            f" nearest: cluster.num_nodes={len(nodes)}"
        ]
    gpus, cpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("GPU", "CPU"))
    on_nodes = f" on each of {request.num_nodes} nodes" if request.num_nodes > 1 else " on one node"
    if request.gpus_per_node:
        if (most := _most_on_each(gpus, request.num_nodes)) < request.gpus_per_node:
            nearest = "cluster.gpus_per_node=0, which trains on CPUs" if most == 0 else f"cluster.gpus_per_node={most}"
            return [
                f"cluster.gpus_per_node: asked for {request.gpus_per_node} GPUs{on_nodes}, the Ray cluster has"
                f" {_by_node(gpus)}; nearest: {nearest}"
            ]
        key = "cluster.gpus_per_node"
    else:
        key = "cluster.cpu_workers_per_node"
    if (most := _most_on_each(cpus, request.num_nodes)) < request.workers_per_node:
        return [
            f"{key}: {request.workers_per_node} workers{on_nodes} need a CPU each, the Ray cluster has"
            f" {_by_node(cpus)}; nearest: {key}={most}"
        ]
    return []


def _most_on_each(amounts: Sequence[int], num_nodes: int) -> int:
    """The largest amount that as many nodes have."""
    return sorted(amounts, reverse=True)[num_nodes - 1]


def _by_node(amounts: Sequence[int]) -> str:
    return f"{amounts[0]}" if len(amounts) == 1 else f"{', '.join(map(str, amounts))} on its {len(amounts)} nodes"


class RayCluster:
    """Machines with a place reserved for every worker.

    Starts a local Ray, or joins the cluster that RAY_ADDRESS names ("host:port" or "auto"); a Ray that this process is
    connected to already is used as it is. Each machine is one bundle of a placement group, on a machine of its own.

    Args:
        num_nodes: Machines.
        gpus_per_node: GPUs on each, one worker a GPU; 0 trains on CPUs.
        cpu_workers_per_node: Workers on each when there are no GPUs.
        placement_timeout_s: Seconds to wait until other jobs have freed what is asked for.

    Attributes:
        request: What was asked for.
        placement_group: One bundle for each machine.
        is_local: True when every worker runs on this machine.

    Raises:
        ConfigurationError: The cluster cannot be reached or lacks what is asked for; says what.
        WorkerDiedError: A local Ray does not start.
    """

    def __init__(
        self, num_nodes: int, gpus_per_node: int, cpu_workers_per_node: int, *, placement_timeout_s: float = 60.0
    ):
        self.request = ClusterRequest(num_nodes, gpus_per_node, cpu_workers_per_node)
        self.placement_group: PlacementGroup | None = None
        self._local_ray: LocalRay | None = None
        self._watch: HeadWatch | None = None
        try:
            self._connect()
            nodes = [node for node in ray.nodes() if node["Alive"]]
            if problems := describe_shortage(self.request, [node["Resources"] for node in nodes]):
                raise ConfigurationError(problems)
            self.is_local = num_nodes == 1 and len(nodes) == 1
            self._reserve(placement_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def failure(self) -> str | None:
        """What has happened to Ray's own servers; None: nothing."""
        return self._watch.failure if self._watch else None

    @property
    def can_be_called(self) -> bool:
        """False when Ray has been stopped or its servers have died: a call to it might wait for ever."""
        return ray.is_initialized() and self.failure is None

    def call_on_each_machine(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function once on every machine of the run, in processes of their own.

        Raises:
            WorkerDiedError: One of them died, or the function raised.
        """
        calls = []
        for bundle in range(self.request.num_nodes):
            strategy = PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=bundle)
            task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
            calls.append(task.remote(*args))
        try:
            return list(ray.get(calls))
        except RayError as error:
            raise WorkerDiedError(f"`{function.__name__}` on the machines of the run: {error}") from error

    def shutdown(self) -> None:
        """Gives back what was reserved, and stops Ray if this object started it. Does nothing the second time."""
        if self.failure is not None:
            return  # nobody answers
        if self.placement_group is not None and ray.is_initialized():
            remove_placement_group(self.placement_group)
        self.placement_group = None
        if self._watch:
            self._watch.stop()
            self._watch = None
            if self._local_ray:
                self._local_ray.shutdown()
            else:
                ray.shutdown()

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Workers without a GPU hide the GPUs themselves; without this Ray warns about its own way of doing so.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = os.environ.get("RAY_ADDRESS", "")
        # What workers print goes to Ray's log files; when one fails, its error and the end of its log are shown.
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
                knock(address, JOIN_TIMEOUT_S)  # Ray itself would try for minutes before it says that nobody is there.
            with kept_in_its_place():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigurationError(
                f"RAY_ADDRESS: cannot join a Ray cluster at {address} ({reason}); unset it to use this machine only"
            ) from error
        self._watch = HeadWatch(RemoteHead(ray.get_runtime_context().gcs_address))

    def _start_local(self) -> None:
        if self.request.num_nodes > 1:
            raise ConfigurationError(
                f"cluster.num_nodes: got {self.request.num_nodes}, this machine is 1; to use more, start Ray on all of"
                " them (ray start) and set RAY_ADDRESS; nearest: cluster.num_nodes=1"
            )
        # Ray counts logical CPUs: more workers than cores only means that they take turns.
        self._local_ray = LocalRay(num_cpus=max(usable_cores(), self.request.workers_per_node))
        self._watch = self._local_ray.watch

    def _reserve(self, timeout_s: float) -> None:
        # One bundle a machine, each on another: as many workers on every machine as asked, never more on one.
        self.placement_group = placement_group([self.request.bundle] * self.request.num_nodes, strategy="STRICT_SPREAD")
        if self.placement_group.wait(timeout_seconds=timeout_s):
            return
        free = ray.available_resources()
        raise ConfigurationError(
            f"cluster: the Ray cluster is large enough, but busy: waited {timeout_s:g} s for {self.request.num_nodes} x"
            f" {_amounts(self.request.bundle)}; free now: {_amounts(free)}. Wait for its other jobs, or ask for less"
        )


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{int(resources.get(kind, 0))} {kind}s" for kind in ("CPU", "GPU") if kind in resources) or "0"

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All ranks of one program as Ray actors. All are stopped after the first failure of a call."""

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar, TypeVarTuple

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.memory_shortage import memory_shortage
from nemo_rl_moe.distributed.node_tools import (
    SHORTEST_WAIT,
    THREADS,
    ProcessIdentity,
    end_families,
    find_families,
    module_search_path,
    process_states,
    read_tail,
    threads_per_worker,
)
from nemo_rl_moe.distributed.worker_process import RECOVERABLE, WorkerFailure, WorkerPlace, WorkerProcess
from nemo_rl_moe.errors import ConfigurationError, UserError, WorkerDiedError

Worker = TypeVar("Worker")
Args = TypeVarTuple("Args")
Result = TypeVar("Result")


def outcome(call: Any) -> Any:
    """Return the result of a call to a Ray actor, or Ray's error."""
    try:
        return ray.get(call)
    except RayError as error:
        return error


def exit_reason(error: RayActorError) -> str:
    """Return the cause of a process's end from Ray's message, in one line and without Ray's guesses."""
    text = " ".join(str(error).split())
    for start in ("Worker exit type:", "The actor is dead because"):
        if start in text:
            reason = text[text.index(start) :]
            for guess in (" If the process was killed by the kernel OOM killer", " Some common causes include:"):
                reason = reason.partition(guess)[0]
            return reason
    return text


def worker_environment(
    places: Sequence[WorkerPlace],
    workers_per_node: int,
    master_port: int,
    *,
    is_local: bool,
    network_interface: str | None = None,
    num_threads: int | None = None,
) -> list[dict[str, str]]:
    """Return the environment variables of each rank.

    Args:
        places: Process and node of each rank, node after node.
        master_port: Port that is reserved on the node of rank 0.
        network_interface: Name of the network interface if ranks are on several machines. If None, gloo and NCCL choose
            one.
        num_threads: Number of threads of each worker. None for an equal share of its machine's cores.
    """
    environments = []
    for rank, place in enumerate(places):
        local_rank = rank % workers_per_node
        on_this_node = places[rank - local_rank : rank - local_rank + workers_per_node]
        threads = str(threads_per_worker(place.num_cores, workers_per_node, num_threads))
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(workers_per_node),
            "MASTER_ADDR": "127.0.0.1" if is_local else places[0].node_ip,
            "MASTER_PORT": str(master_port),
            THREADS: threads,
            "MKL_NUM_THREADS": threads,
            **{name: os.environ.get(name, value) for name, value in SHORTEST_WAIT.items()},
            "TOKENIZERS_PARALLELISM": "false",
            # Every worker sees all GPUs of the run on its node, so that LOCAL_RANK is the CUDA device and NCCL finds
            # direct connections. Empty on CPUs, to hide GPUs that the run does not use.
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for neighbour in on_this_node for gpu in neighbour.gpu_ids),
        }
        if network_interface is not None and not is_local:
            environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), network_interface)
        environments.append(environment)
    return environments


ROOT_CAUSE_WAIT_S = 3.0
"""Seconds to wait after the first failure. A peer's "connection closed" often arrives before the causing death."""
LONGEST_WAIT_S = 1.0
"""Seconds between two checks for a dead server of Ray during a call. Ray itself reports it only after a minute."""
END_GRACE_S = 2.0
"""Seconds for Ray to kill the workers, before their remaining processes are killed."""
LOG_TAIL_LINES = 30
MOST_TAILS = 8
REMOTE_CALL_TIMEOUT_S = 8.0
HELD_STATES = {
    psutil.STATUS_STOPPED: "its process has been stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "its process is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "its process waits for a disk or a device",
}
SMALL_TYPES = (bool, int, float, str, type(None), Path)


def start_processes(cluster: RayCluster) -> list[Any]:
    """Start the processes of all ranks, and return their actors without waiting."""
    config = cluster.config
    actor_class = ray.remote(WorkerProcess)
    return [
        actor_class.options(
            num_cpus=1,
            num_gpus=1 if config.gpus_per_node else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=cluster.placement_group,
                placement_group_bundle_index=rank // config.workers_per_node,
            ),
        ).remote()
        for rank in range(config.world_size)
    ]


class WorkerGroup(Generic[Worker]):
    """All ranks of one program, each with a worker in a separate process.

    A call names a method of the worker's class, `group.call_all(Worker.method, argument)`, so that arguments and
    results are typed and go-to-definition works.

    Args:
        make_worker: Called on each rank as `make_worker(rank, world_size)`. Its modules are imported there, after the
            rank's environment is set. Usually a `partial` of a worker class. For an error that every rank finds, it
            returns a `UserError` instead of raising it. That error is raised here when all ranks have answered. An
            error that it raises stops all ranks at once.
        start_timeout_s: Limit for the start of all ranks.
        call_timeout_s: Limit for a call.
        environment: Further environment variables of each rank.
        ranks_per_job: Number of consecutive ranks on one machine that form one `torch.distributed` job, with ranks
            counted from 0 in each job. If None, all ranks are one job.
        model: Name of the model in errors, such as `teacher`. None for the policy or the only model.

    Raises:
        WorkerDiedError: A worker failed or did not start in time. All of them have been stopped.
        ConfigurationError: Ranks have returned errors. All of them have been stopped.
    """

    def __init__(
        self,
        cluster: RayCluster,
        make_worker: Callable[[int, int], Worker | UserError],
        start_timeout_s: float,
        call_timeout_s: float,
        environment: Mapping[str, str] = MappingProxyType({}),
        ranks_per_job: int | None = None,
        model: str | None = None,
    ):
        self._cluster = cluster
        self._of_model = "" if model is None else f" of the {model}"
        self._ranks_per_job = ranks_per_job or cluster.config.world_size
        self._environment = dict(environment)
        self._call_timeout_s = call_timeout_s
        self._driver_node = ray.get_runtime_context().get_node_id()
        self._actors: list[Any] = []
        self._places: dict[int, WorkerPlace] = {}
        self._ended = False
        self._failure: str | None = None
        self._start_lock = threading.Lock()
        try:
            self._start(make_worker, start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def world_size(self) -> int:
        return self._cluster.config.world_size

    @property
    def process_ids(self) -> list[int]:
        return [self._places[rank].process.pid for rank in sorted(self._places)]

    def call_all(self, method: Callable[[Worker, *Args], Result], *args: *Args) -> list[Result]:
        """Call a method with the same arguments on every rank, and return the results by rank.

        Raises:
            WorkerDiedError: A worker raised, died or did not answer in time. All of them have been stopped.
            CheckpointError, WeightSyncError: Raised by a rank, when all have answered. The workers continue.
        """
        return list(self.start_each(method, [args] * self.world_size)().values())

    def start_each(
        self, method: Callable[[Worker, *Args], Result], args_by_rank: Sequence[tuple[*Args] | None]
    ) -> Callable[[], dict[int, Result]]:
        """Start a method with separate arguments on each rank. It runs after earlier calls.

        An object for several ranks is transferred once. Several threads may call this: every rank gets their calls in
        the same order.

        Args:
            args_by_rank: Positional arguments of each rank. A rank with None is not called.

        Returns:
            A function that waits for the results of the called ranks, in rank order, and raises like `call_all`. The
            time limit begins when this function is called.

        Raises:
            WorkerDiedError: The workers have been stopped. If a failure stopped them, the message describes it.
        """
        name = method.__name__
        if self._failure is not None:
            raise WorkerDiedError(self._failure)
        if self._ended:
            raise WorkerDiedError(f"cannot call `{name}`: the workers have been stopped")
        if len(args_by_rank) != self.world_size:
            raise ValueError(f"`{name}` got arguments for {len(args_by_rank)} ranks, expected {self.world_size}")
        called = [rank for rank, args in enumerate(args_by_rank) if args is not None]
        shared = _put_shared([args for args in args_by_rank if args is not None])
        calls: list[Any] = [None] * self.world_size
        # Ranks that got the calls of two threads in different orders would wait for each other in their collectives.
        with self._start_lock:
            for rank, args in zip(called, shared, strict=True):
                calls[rank] = self._actors[rank].call.remote(self._call_timeout_s, method, *args)

        def results() -> dict[int, Result]:
            deadline = time.monotonic() + self._call_timeout_s
            too_late = f"did not answer `{name}` within {self._call_timeout_s:g} s (cluster.worker_call_timeout_s)"
            found = self._wait(f"in `{name}`", calls, deadline, partial(self._fail_for_time, too_late))
            for result in found.values():
                if isinstance(result, RECOVERABLE):
                    raise result
            return found

        return results

    def shutdown(self) -> None:
        """Stop every worker and everything that it has started. Do nothing the second time."""
        self._ended = True
        actors, self._actors = self._actors, []
        if not actors:
            return
        by_node: defaultdict[str, list[ProcessIdentity]] = defaultdict(list)
        for place in self._places.values():
            by_node[place.node_id].append(place.process)
        members = {
            node: self._on_node(node, find_families, processes, default=[]) for node, processes in by_node.items()
        }
        if self._cluster.can_be_called:
            # Ray must kill them first, or it would warn of killed workers.
            for actor in actors:
                with suppress(RayError, ValueError):
                    ray.kill(actor, no_restart=True)
        # Ray does not kill the children of a worker, and may be late for one that hangs in a library.
        for node, family in members.items():
            self._on_node(node, end_families, family, END_GRACE_S, default=None)

    def _start(self, make_worker: Callable[[int, int], Worker | UserError], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        too_late = f"did not start within {timeout_s:g} s (cluster.worker_start_timeout_s)"
        config = self._cluster.config
        self._actors = self._cluster.started_processes or start_processes(self._cluster)
        self._cluster.started_processes = []

        def wait(calls: list[ray.ObjectRef], on_result: Callable[[int, Any], None] = lambda rank, result: None) -> Any:
            by_rank = self._wait("while starting", calls, deadline, partial(self._fail_for_time, too_late), on_result)
            return list(by_rank.values())

        places = wait([actor.place.remote() for actor in self._actors], self._places.__setitem__)
        size = self._ranks_per_job
        ports = wait([actor.reserve_port.remote() for actor in self._actors[::size]])
        environments = [
            environment
            for job, port in enumerate(ports)
            for environment in worker_environment(
                places[job * size : (job + 1) * size],
                min(config.workers_per_node, size),
                port,
                is_local=self._cluster.is_local,
                network_interface=config.network_interface,
                num_threads=self._cluster.num_threads,
            )
        ]
        search_path = module_search_path()
        remaining_s = deadline - time.monotonic()
        payload = ray.put(cloudpickle.dumps(make_worker))
        answers = wait(
            [
                actor.start.remote(
                    environment | self._environment, search_path, payload, rank % size, size, remaining_s
                )
                for rank, (actor, environment) in enumerate(zip(self._actors, environments, strict=True))
            ]
        )
        if problems := _problems_of_ranks(answers):
            raise ConfigurationError(problems)

    def _wait(
        self,
        doing: str,
        calls: Sequence[Any],
        deadline: float,
        on_silence: Callable[[Sequence[int]], NoReturn],
        on_result: Callable[[int, Any], None] = lambda rank, result: None,
    ) -> dict[int, Any]:
        """Wait for a call on each rank, until the first failure or the deadline. Return the results by rank."""
        # Ranks whose call is None are not in the result.
        pending = {call: rank for rank, call in enumerate(calls) if call is not None}
        results: dict[int, Any] = {}
        failures: dict[int, WorkerFailure | RayError] = {}
        while pending:
            remaining = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=min(remaining, LONGEST_WAIT_S))
            if problem := self._cluster.failure:
                self._stop_and_raise(f"{problem}, {doing}.")
            if not ready:
                if remaining > LONGEST_WAIT_S:
                    continue
                if failures:
                    break
                on_silence(sorted(pending.values()))
            rank = pending.pop(ready[0])
            result = outcome(ready[0])
            if isinstance(result, WorkerFailure | RayError):
                if not failures:
                    deadline = time.monotonic() + ROOT_CAUSE_WAIT_S
                failures[rank] = result
            else:
                results[rank] = result
                on_result(rank, result)
        if failures:
            self._fail(doing, failures, pending.values())
        return {rank: results[rank] for rank in sorted(results)}

    def _fail(
        self, doing: str, failures: Mapping[int, WorkerFailure | RayError], unanswered: Iterable[int]
    ) -> NoReturn:
        """Stop all workers and raise the error that most likely caused the other errors."""
        # Deaths come first, as they cause errors of other ranks. Otherwise the first error counts, such as that of a
        # rank whose library gave up waiting for a frozen one.
        died = [rank for rank, failure in failures.items() if isinstance(failure, OutOfMemoryError)]
        died += [rank for rank, failure in failures.items() if isinstance(failure, RayActorError)]
        rank = died[0] if died else next(iter(failures))
        failure = failures[rank]
        headline = failure.headline if isinstance(failure, WorkerFailure) else ""
        if isinstance(failure, WorkerFailure):
            what, details = failure.summary, failure.details
        elif isinstance(failure, OutOfMemoryError):
            what, details = "was ended by Ray's memory monitor", memory_shortage(str(failure), self._names())
        elif isinstance(failure, RayActorError):
            what, details = "died", f"{exit_reason(failure)}\n{self._tail(rank)}".rstrip()
        else:
            what, details = f"raised {type(failure).__name__}", str(failure)
        others = sorted(set(failures) - {rank})
        also = f"\nAfter it failed: {', '.join(f'rank {other}' for other in others)}." if others else ""
        for frozen, why in self._held(unanswered).items():
            also += f"\nDid not answer: {self._name(frozen)}: {why}."
        details = f":\n{details}" if details else "."
        self._stop_and_raise(f"{headline}worker {self._name(rank)} {what} {doing}{details}{also}")

    def _fail_for_time(self, too_late: str, ranks: Sequence[int]) -> NoReturn:
        """Stop all workers and raise an error with the ranks that cannot run, or with the stacks of all late ranks."""
        held = self._held(ranks)
        if not held:
            tails = [self._tail(rank) or f"{self._name(rank)} has written no stack." for rank in ranks[:MOST_TAILS]]
            names = ", ".join(map(self._name, ranks))
            self._stop_and_raise("\n".join([f"{len(ranks)} of {self.world_size} workers {too_late}: {names}", *tails]))
        first, *others = (f"{self._name(rank)}: {why}" for rank, why in held.items())
        waiting = [self._name(rank) for rank in ranks if rank not in held]
        also = f"\nStill waiting then: {', '.join(waiting)}." if waiting else ""
        self._stop_and_raise("\n".join([f"worker {first}; it {too_late}", *others]) + also)

    def _held(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return rank -> reason for the ranks whose processes cannot run, for example because of SIGSTOP."""
        by_node: defaultdict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            if rank in self._places:
                by_node[self._places[rank].node_id].append(rank)
        held: dict[int, str] = {}
        for node, members in by_node.items():
            processes = [self._places[rank].process for rank in members]
            states = self._on_node(node, process_states, processes, default=[""] * len(members))
            held |= {
                rank: HELD_STATES[state] for rank, state in zip(members, states, strict=True) if state in HELD_STATES
            }
        return dict(sorted(held.items()))

    def _stop_and_raise(self, message: str) -> NoReturn:
        stopped = "The worker has" if self.world_size == 1 else f"All {self.world_size} workers have"
        # Set before the stop, so that calls of other threads fail with the cause and not with its effect.
        self._failure = self._failure or f"{message}\n{stopped} been stopped."
        self.shutdown()
        raise WorkerDiedError(self._failure)

    def _name(self, rank: int) -> str:
        place = self._places.get(rank)
        if place is None:
            return f"rank {rank}{self._of_model}"
        node = "" if self._cluster.is_local else f", node {place.node_ip}"
        return f"rank {rank}{self._of_model} (pid {place.process.pid}{node})"

    def _names(self) -> dict[tuple[str, int], str]:
        """Return (address of a machine, process id) -> name, for each process of this run."""
        names = {
            (place.node_ip, place.process.pid): f"rank {rank}{self._of_model}" for rank, place in self._places.items()
        }
        return {(ray.util.get_node_ip_address(), os.getpid()): "main process"} | names

    def _tail(self, rank: int) -> str:
        """Return the end of a worker's stderr."""
        place = self._places.get(rank)
        if place is None:
            return ""
        tail = self._on_node(place.node_id, read_tail, place.stderr_path, LOG_TAIL_LINES, default="")
        return f"The end of the stderr of rank {rank}{self._of_model}:\n{tail}" if tail else ""

    def _on_node(self, node_id: str, function: Callable[..., Any], *args: Any, default: Any) -> Any:
        """Call a function on one of the machines. Return `default` if the machine is dead."""
        if node_id == self._driver_node:
            return function(*args)
        if not self._cluster.can_be_called:
            return default
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        call = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(*args)
        try:
            return ray.get(call, timeout=REMOTE_CALL_TIMEOUT_S)
        except RayError:
            return default


def _problems_of_ranks(answers: Sequence[UserError | None]) -> list[str]:
    """Return the problems of the first rank that has any, with its number if other ranks have none."""
    found = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    if not found:
        return []
    rank, error = found[0]
    where = f" (on rank {rank})" if len(found) < len(answers) else ""
    return [f"{problem}{where}" for problem in error.problems]


def _put_shared(args_by_rank: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Store each larger object that several ranks get once. Return the arguments with references to the stored copy."""
    times = Counter(id(arg) for args in args_by_rank for arg in args)
    stored: dict[int, Any] = {}

    def share(arg: Any) -> Any:
        if times[id(arg)] == 1 or isinstance(arg, SMALL_TYPES):
            return arg
        if id(arg) not in stored:
            stored[id(arg)] = ray.put(arg)
        return stored[id(arg)]

    return [[share(arg) for arg in args] for args in args_by_rank]

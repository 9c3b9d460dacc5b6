# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker processes for rewards and tools: Ray actors without reserved resources, which are left to the ranks."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, TypeVarTuple

import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from nemo_rl_moe.distributed.memory_shortage import memory_shortage
from nemo_rl_moe.distributed.node_tools import module_search_path
from nemo_rl_moe.distributed.worker_group import exit_reason, outcome
from nemo_rl_moe.distributed.worker_process import WorkerFailure, WorkerProcess
from nemo_rl_moe.errors import WorkerDiedError

Worker = TypeVar("Worker")
Args = TypeVarTuple("Args")
Result = TypeVar("Result")

START_TIMEOUT_S = 300.0
CALL_SLACK_S = 30.0
"""Seconds that a call may take beyond the limit of its work, before its worker counts as dead."""
_ENVIRONMENT = {
    # The ranks of the policy use the cores and the GPUs.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Lost:
    """Result of a call whose worker died or did not answer in time.

    Attributes:
        reason: Reason of the loss in one line.
        seconds: Time from the call to the loss.
        was_before: Whether the worker had died before the call, for example killed from outside.
    """

    reason: str
    seconds: float
    was_before: bool


@dataclass(frozen=True)
class _Starting:
    number: int
    call: Any
    deadline: float


class WorkerPool(Generic[Worker]):
    """Equal worker processes, spread over the nodes of the running Ray cluster.

    Each runs one call at a time. A worker that dies, or does not answer in time, is replaced. Ray ends the workers when
    the driver is killed, even if they are blocked.

    Args:
        name: Name of a worker, such as `reward worker`.
        make: Makes a worker in its process, from its number and the number of workers.
        num_workers: Number of calls that run at the same time. Others wait.
    """

    def __init__(self, name: str, make: Callable[[int, int], Worker], num_workers: int):
        self._name, self._num_workers = name, num_workers
        self._arguments = (_ENVIRONMENT, module_search_path(), cloudpickle.dumps(make))
        self._actors: dict[int, Any] = {}
        self._idle: SimpleQueue[int] = SimpleQueue()
        self._lock, self._is_stopped = threading.Lock(), False
        # Each thread waits for the call of one worker.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix=name)
        try:
            for starting in [self._start(number) for number in range(num_workers)]:
                self._finish_start(starting)
        except BaseException:
            self.shutdown()
            raise

    def submit(
        self, limit_s: float, method: Callable[[Worker, *Args], Result], *args: *Args
    ) -> "Future[Result | Lost]":
        """Call a method of the next free worker, and return the future result.

        Args:
            limit_s: Seconds that the call may take. The wait for a free worker does not count.
        """
        try:
            return self._threads.submit(lambda: self._call(limit_s, method, *args))
        except RuntimeError:
            raise self.stopped() from None

    def stopped(self) -> WorkerDiedError:
        """Return the error of a call after `shutdown`."""
        return WorkerDiedError(f"the {self._name}s have been stopped")

    def shutdown(self) -> None:
        """Stop all workers and their calls. Do nothing the second time."""
        with self._lock:
            self._is_stopped = True
            actors, self._actors = self._actors, {}
        for number, actor in actors.items():
            kill(actor)
            self._idle.put(number)  # wakes a call that waits for a worker which could not be replaced
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, limit_s: float, method: Callable[[Worker, *Args], Result], *args: *Args) -> Result | Lost:
        number = self._idle.get()
        with self._lock:
            if self._is_stopped:
                raise self.stopped()
            actor = self._actors[number]
        allowed_s = limit_s + CALL_SLACK_S
        started_at = time.monotonic()
        ping, call = actor.place.remote(), actor.call.remote(allowed_s, method, *args)
        is_over = bool(ray.wait([call], timeout=allowed_s)[0])
        result: Any = outcome(call) if is_over else None
        if is_over and not isinstance(result, Exception | WorkerFailure):
            self._idle.put(number)
            found: Result = result
            return found
        seconds = time.monotonic() - started_at
        if not is_over:
            kill(actor)  # a frozen one never answers the ping
        lost = Lost(_reason_of_end(result), seconds, was_before=isinstance(outcome(ping), RayError))
        self._finish_start(self._start(number))
        return lost

    def _start(self, number: int) -> _Starting:
        """Begin to start a worker, after killing an earlier worker of its number. Return the start to wait for."""
        options = ray.remote(WorkerProcess).options(
            num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy="SPREAD"
        )
        with self._lock:
            if self._is_stopped:
                raise self.stopped()
            if number in self._actors:
                kill(self._actors[number])
            actor = self._actors[number] = options.remote()
            call = actor.start.remote(*self._arguments, number, self._num_workers, START_TIMEOUT_S)
        return _Starting(number, call, time.monotonic() + START_TIMEOUT_S)

    def _finish_start(self, starting: _Starting) -> None:
        name = f"{self._name} {starting.number}"
        is_over = ray.wait([starting.call], timeout=max(0.0, starting.deadline - time.monotonic()))[0]
        if not is_over:
            raise WorkerDiedError(f"{name} did not start within {START_TIMEOUT_S:g} s")
        result = outcome(starting.call)
        if isinstance(result, WorkerFailure):
            raise WorkerDiedError(f"{name} {result.summary} while starting:\n{result.details}")
        if result is not None:
            raise WorkerDiedError(f"{name} died while starting:\n{_reason_of_end(result)}")
        self._idle.put(starting.number)


def kill(actor: Any) -> None:
    """End a worker's process, unless it has ended already."""
    with suppress(RayError, ValueError):  # Ray has been stopped, or the actor has died
        if ray.is_initialized():
            ray.kill(actor, no_restart=True)


def _reason_of_end(result: object) -> str:
    """Return one line on why a call has failed."""
    if isinstance(result, WorkerFailure):
        return result.details
    if isinstance(result, OutOfMemoryError):
        return memory_shortage(str(result), {})
    return exit_reason(result) if isinstance(result, RayActorError) else " ".join(str(result).split())

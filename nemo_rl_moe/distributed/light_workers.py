# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker processes beside the ranks, for rewards and tools: Ray actors that take no place, core or GPU from them."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from nemo_rl_moe.distributed.memory_shortage import memory_shortage
from nemo_rl_moe.distributed.worker_group import exit_reason
from nemo_rl_moe.distributed.worker_process import WorkerFailure, WorkerProcess
from nemo_rl_moe.errors import WorkerDiedError

START_TIMEOUT_S = 300.0
CALL_SLACK_S = 30.0
"""Seconds that a call may take beyond the limits of its work, before its worker is taken for dead."""
_ENVIRONMENT = {
    # The policy workers have the cores and the GPUs.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


class LightWorkers:
    """Starts worker processes that are alike, spread over the nodes of the cluster. Ray must be running.

    Ray ends them when the driver is killed, even those that are blocked.

    Args:
        make: Function of a worker's number and their count that makes the worker, in its process.
        num_workers: Their count.
    """

    def __init__(self, make: Callable[[int, int], object], num_workers: int):
        search_path = [str(Path(folder).absolute()) for folder in sys.path]
        self._arguments = (_ENVIRONMENT, search_path, cloudpickle.dumps(make))
        self._num_workers = num_workers

    def start(self, number: int) -> tuple[Any, Any]:
        """Return the actor of a worker, and the call that starts it: its outcome is for `check_start`."""
        options = ray.remote(WorkerProcess).options(
            num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy="SPREAD"
        )
        actor = options.remote()
        return actor, actor.start.remote(*self._arguments, number, self._num_workers, START_TIMEOUT_S)


def check_start(name: str, result: object, deadline: float) -> None:
    """Check the outcome of the call that starts a worker.

    Args:
        name: Of the worker.
        deadline: Time at which it was to have started.

    Raises:
        WorkerDiedError: The worker cannot be made; carries its own error.
    """
    if result is None:
        return
    if isinstance(result, WorkerFailure):
        raise WorkerDiedError(f"{name} {result.summary} while starting:\n{result.details}")
    if time.monotonic() >= deadline:
        raise WorkerDiedError(f"{name} did not start within {START_TIMEOUT_S:g} s")
    raise WorkerDiedError(f"{name} died while starting:\n{reason_of_end(result)}")


def kill(actor: Any) -> None:
    """End a worker's process; does nothing where it has ended already."""
    # Raised where Ray has been stopped or the actor has died already.
    with suppress(RayError, ValueError):
        if ray.is_initialized():
            ray.kill(actor, no_restart=True)


def reason_of_end(result: Any) -> str:
    """Return why a call has failed, in one line."""
    if isinstance(result, WorkerFailure):
        return result.details
    if isinstance(result, OutOfMemoryError):
        return memory_shortage(str(result), {})
    return exit_reason(result) if isinstance(result, RayActorError) else " ".join(str(result).split())

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Ray actor around a worker object: sets its environment, calls its methods, and returns errors as text."""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray import cloudpickle

from nemo_rl_moe.distributed.node_tools import ProcessIdentity, usable_cores
from nemo_rl_moe.errors import CheckpointError, UserCodeError, UserError, WeightSyncError

Result = TypeVar("Result")
STACK_BEFORE_TIMEOUT_S = 1.0
RECOVERABLE = (CheckpointError, WeightSyncError)
"""Errors that every rank raises, and after which all of them can continue."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES, _LARGEST_KEPT_BYTES = 256 * 1024**2, 32 * 1024**2


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's process, with its node (`num_cores` usable cores), GPUs (as in CUDA_VISIBLE_DEVICES) and log."""

    process: ProcessIdentity
    node_id: str
    node_ip: str
    num_cores: int
    gpu_ids: tuple[str, ...]
    stderr_path: Path | None


@dataclass(frozen=True)
class WorkerFailure:
    """Text of an exception that a worker raised, as the exception itself may not survive pickling.

    Attributes:
        details: The traceback from the worker's frame on, or only the message of an error for users.
        headline: Beginning of the error message, before the name of the worker that failed.
    """

    summary: str
    details: str
    headline: str = ""


class WorkerProcess:  # pragma: no cover  (runs in another process)
    """One rank's process.

    It sets its environment before heavy imports, as numeric libraries read the number of threads when they are loaded.
    """

    def __init__(self) -> None:
        outlive_requests_to_stop()
        self._worker: Any = None
        self._reserved_port: socket.socket | None = None

    def place(self) -> WorkerPlace:
        context = ray.get_runtime_context()
        stderr_path = Path("/proc/self/fd/2").resolve()
        return WorkerPlace(
            process=ProcessIdentity.of(psutil.Process()),
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            num_cores=usable_cores(),
            gpu_ids=tuple(map(str, ray.get_gpu_ids())),
            stderr_path=stderr_path if stderr_path.is_file() else None,
        )

    def reserve_port(self) -> int:
        """Return a TCP port of this node that other processes do not get while this one lives."""
        self._reserved_port = bound_socket()
        port: int = self._reserved_port.getsockname()[1]
        return port

    def prepare(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        """Set the environment and import modules ahead of `start`."""
        os.environ.update(environment)
        for name in modules:
            with suppress(Exception):  # the import in `start` reports it
                import_module(name)

    def start(
        self,
        environment: Mapping[str, str],
        search_path: Sequence[str],
        payload: bytes,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> WorkerFailure | UserError | None:
        """Set the environment, then import and make the worker. Return the error if that fails, otherwise None.

        If this hangs, for example because ranks cannot reach each other, it writes its stack to stderr before the
        driver gives up.

        Args:
            search_path: The driver's `sys.path`, of which Ray only passes on a part.
            payload: Pickled function of rank and world size that makes the worker. Unpickling imports its modules.
        """
        _write_stack_before(timeout_s)
        try:
            os.environ.update(environment)
            sys.path += [folder for folder in search_path if folder not in sys.path]
            make_worker = cloudpickle.loads(payload)
            self._worker = make_worker(rank, world_size)
            return self._worker if isinstance(self._worker, UserError) else None
        except BaseException as error:
            return describe_failure(error)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def call(self, timeout_s: float, method: Callable[..., Result], *args: Any) -> Result | Exception | WorkerFailure:
        """Call a method of the worker's class on the worker. Return errors as `WorkerFailure`, except `RECOVERABLE`.

        If the method hangs, the process writes its stack to stderr before the driver gives up after `timeout_s`.
        """
        _write_stack_before(timeout_s)
        try:
            return method(self._worker, *args)
        except RECOVERABLE as error:
            return error.with_traceback(None)
        except BaseException as error:
            return describe_failure(error)
        finally:
            faulthandler.cancel_dump_traceback_later()


def bound_socket() -> socket.socket:
    """Return a socket that reserves a free port, on which a server with SO_REUSEADDR can still listen."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("", 0))
    return bound


def _write_stack_before(timeout_s: float) -> None:  # pragma: no cover  (runs in another process)
    faulthandler.dump_traceback_later(max(1.0, timeout_s - STACK_BEFORE_TIMEOUT_S), file=2)


def outlive_requests_to_stop() -> None:  # pragma: no cover  (runs in another process)
    """Make this process survive the signals that batch systems send to every process of a job. The driver ends workers.

    SIGTERM gets a handler instead of being ignored or blocked, because child processes would inherit that.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def keep_freed_memory() -> None:
    """Have glibc keep up to 256 MiB of freed memory, except arrays of 32 MiB and more.

    By default it returns the memory to the system: a step of the demo's GRPO had 10,000 page faults, 3% of its time.
    """
    with suppress(AttributeError):  # other C libraries
        set_option = ctypes.CDLL(None).mallopt
        set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


def describe_failure(error: BaseException) -> WorkerFailure:
    """Return the text of an exception that the calling frame has caught."""
    summary = f"raised {type(error).__name__}"
    if isinstance(error, UserError):
        return WorkerFailure(summary, str(error))
    if isinstance(error, UserCodeError):
        return WorkerFailure("failed", error.trace, headline=f"{error.problem}\n")
    # The first frame is that of `WorkerProcess`.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return WorkerFailure(summary, "".join(traceback.format_exception(error.with_traceback(frames))).rstrip())

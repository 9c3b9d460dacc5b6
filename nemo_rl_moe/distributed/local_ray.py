# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A Ray of this process's own: started out of reach of signals meant for the program, and ended at once."""

import logging
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from nemo_rl_moe.distributed.head_watch import HeadWatch, LocalHead
from nemo_rl_moe.distributed.node_tools import ProcessIdentity, end_processes
from nemo_rl_moe.errors import WorkerDiedError

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

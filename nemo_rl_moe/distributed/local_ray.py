# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ray on this machine for one run: shielded from signals to the program, monitored, and ended quickly."""

import atexit
import ctypes
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
from ray._private import ray_constants

from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY, end_processes, families, is_running, ray_folder
from nemo_rl_moe.distributed.run_process import STOP_SIGNALS, leave
from nemo_rl_moe.errors import EXIT_RUN_FAILED, WorkerDiedError, printable, report_error

USUAL_OBJECT_STORE_BYTES = 512 * 1024**2
SMALLEST_OBJECT_STORE_BYTES = 80 * 1024**2
MOST_OF_THE_MEMORY = 0.3
"""Fraction of a machine's memory that an object store may take. 0.3 is also Ray's default."""
SERVERS = ("gcs_server", "raylet")
POLL_S = 0.1
_NEWEST_BYTES, _LONGEST_ERROR = 8192, 300
_ERROR_LINE = re.compile(r"\[[^\]]* [ECF] \d+ \d+\] \(\w+\) (.*)")
"""Pattern of a log line of one of Ray's servers with an error or worse. Its group is the text of the error."""
_RAYS_EXCUSE = re.compile(r"An unexpected system state has occurred\..*?fix it\. ")
_ACTION_BYTES = 1024
"""Size of a buffer in bytes, at least that of the C library's `struct sigaction`."""
_GET_NODE = ray._private.services.get_node
_LATE_AGENT = "Timed out waiting for file"
_STARTING_AGAIN = (
    "warning: Ray's agents did not start within its 15 s, as happens on a busy machine: starting Ray again"
)
MOST_STARTS = 3
MOST_REMOVALS = 20
UNWINDING_S = 6.0
"""Seconds in which the program may end in order after a server has died. Then it is killed, because calls to Ray may
never return."""


def object_store_bytes(stored_bytes: int = 0) -> int:
    """Return the size in bytes of an object store for batches and metrics, smaller if shared memory is scarce.

    Args:
        stored_bytes: Number of further bytes that a run stores. Ray spills objects to the disk if the store is full.
    """
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        free = USUAL_OBJECT_STORE_BYTES
    wanted = USUAL_OBJECT_STORE_BYTES
    if stored_bytes:
        wanted = max(wanted, min(wanted + stored_bytes, int(MOST_OF_THE_MEMORY * psutil.virtual_memory().total)))
    return max(SMALLEST_OBJECT_STORE_BYTES, min(wanted, int(0.8 * free)))


def last_error(log: Path) -> str:
    """Return the last error among the newest lines of a server's log. Empty without one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _NEWEST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    errors = [found[1] for line in lines if (found := _ERROR_LINE.match(line)) is not None]
    return printable(_RAYS_EXCUSE.sub("", errors[-1]))[:_LONGEST_ERROR] if errors else ""


@contextmanager
def preserved_handlers() -> Iterator[None]:
    """Keep Ray from replacing the program's SIGTERM handler during `ray.init`, and from printing logs.

    Ray would print pages of its servers' logs when a worker or server dies, although the driver's errors report it.
    """
    ray._private.worker.print_to_stdstream = lambda *args, **options: None
    handler, action = signal.getsignal(signal.SIGTERM), ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    try:
        # Also during `ray.init`, in which Ray's handler would end the program with exit code 15.
        with patch.object(ray._private.utils, "set_sigterm_handler", lambda handler: None):
            yield
    finally:
        # Ray's C++ library has installed a handler that prints a stack in front of the program's handler.
        ctypes.CDLL(None).sigaction(signal.SIGTERM, action, None)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """In this context, start child processes and threads with the signals `STOP_SIGNALS` blocked."""
    # Batch systems signal every process of a job, and terminals every foreground process. Ray's servers would end
    # before the run has saved.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class _DiedInTheStartError(Exception):
    """A raylet has died while it started. Not a subclass of `RuntimeError`, because Ray retries after such errors."""


class LocalRay:
    """Ray's servers as children of this process.

    A thread notices within a second that a server has died, for example from lack of memory. Ray itself would report
    the death after a minute or never. If this process still runs a few seconds after the death, the thread ends this
    process with a message.

    On a busy machine the raylet may die at start, because it waits at most 15 s for its agents' ports
    (ray-project/ray#65983). In this case, Ray is started again.

    Args:
        stored_bytes: Number of bytes in the object store besides batches and metrics.
    """

    def __init__(self, num_cpus: int, stored_bytes: int = 0):
        self._object_store_bytes = object_store_bytes(stored_bytes)
        self._others = set(psutil.Process().children())
        self._folder = ray_folder(os.getpid())
        self._servers: dict[str, psutil.Process] = {}
        self._processes: list[psutil.Process] | None = None
        self._failure: str | None = None
        self._exit_code = EXIT_RUN_FAILED
        self._stopped, self._starts_again, self._lock = threading.Event(), threading.Event(), threading.Lock()
        # Handlers that are registered later, such as the ends of loggers, run before this one. Ray's handler would run
        # after it, and wait for dead servers or crash.
        atexit.register(self._leave_out_ray)
        self._thread = threading.Thread(target=self._watch, name="watch over Ray", daemon=True)
        self._thread.start()
        try:
            # Servers and workers listen on the loopback interface, as Ray's do on systems without clusters. On Linux
            # they would listen on this machine's address, where others could reach their ports.
            loopback_only = patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False)
            while_they_live = patch.object(ray._private.services, "get_node", self._get_node)
            with preserved_handlers(), _blocked_stop_signals(), loopback_only, while_they_live:
                for starts_left in reversed(range(MOST_STARTS)):
                    try:
                        self._start(num_cpus)
                        break
                    except Exception:
                        is_late = _LATE_AGENT in last_error(self._log_of("raylet"))
                        if not starts_left or not is_late or signal.sigpending().intersection(STOP_SIGNALS):
                            raise
                        print(_STARTING_AGAIN, file=sys.stderr, flush=True)
                        self._clear_away()
        except Exception as error:
            problem = self._failure
            self._stop_watching()
            # Ray would leave the started servers running until this process ends.
            end_processes(self._family())
            shutil.rmtree(self._folder, ignore_errors=True)
            raise WorkerDiedError(f"Ray could not be started on this machine: {problem or error}") from error
        # Later children, such as a logger's service, are not Ray's.
        self._processes = self._children()

    @property
    def failure(self) -> str | None:
        """Error message if a server has died, otherwise None. After a death, calls to Ray may never return."""
        return self._failure

    def let_die(self) -> None:
        """Mark the servers as unneeded, so that their death does not count as a failure of the run."""
        self._exit_code = 0

    def shutdown(self) -> None:
        """End the servers and all processes that they have started."""
        self._stop_watching()
        family = self._family()
        node: Any = getattr(ray._private.worker, "_global_node", None)
        if kill := getattr(node, "kill_all_processes", None):
            # SIGTERM is blocked in the servers, and Ray would wait a second for each.
            node.kill_all_processes = lambda **options: kill(**options | {"allow_graceful": False})
        ray.shutdown()
        end_processes(family)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, num_cpus: int) -> None:
        # Ray makes its folders writable for all users, so they are in a private folder. An existing one is from an
        # earlier process with this id, or from another user who waits for us to use it.
        for _ in range(MOST_REMOVALS):
            if not self._folder.exists():
                break
            time.sleep(POLL_S)  # a server of a failed start may have written into it meanwhile
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            _temp_dir=str(self._folder / "ray"),
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=self._object_store_bytes,
            # By default, Ray's workers have a low priority (niceness 15). Here they are the program itself.
            _system_config={"worker_niceness": 0},
        )
        with suppress(OSError, RuntimeError):  # without a token or a home
            (Path.home() / ".ray" / "auth_token").chmod(0o600)  # Ray lets other users read it

    def _get_node(self, *args: Any) -> Any:
        """Call Ray's `get_node`, but raise an error if the raylet dies. Ray's function would wait half a minute."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(_GET_NODE(*args))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        while self._failure is None:
            if wait([answer], POLL_S).done:
                return answer.result()
        raise _DiedInTheStartError(self._failure)

    def _clear_away(self) -> None:
        """Clean up after a failed start of the servers, so that their death does not count as a failure of the run."""
        with self._lock:  # blocks the watch meanwhile
            end_processes(self._family())
            ray.shutdown()
            # A dead server is still listed as a child while Ray has its handle.
            self._others |= set(self._children())
            self._servers, self._failure = {}, None
            self._starts_again.set()

    def _log_of(self, server: str) -> Path:
        return self._folder / "ray" / "session_latest" / "logs" / f"{server}.out"

    def _children(self) -> list[psutil.Process]:
        """Return Ray's processes among the children of this process, without children that other threads started."""
        return [child for child in psutil.Process().children() if child not in self._others and self._is_rays(child)]

    def _is_rays(self, child: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            # An ended process still has a name, but no command line.
            return child.name() in SERVERS or any(str(self._folder) in word for word in child.cmdline())
        return False

    def _family(self) -> list[psutil.Process]:
        return families(self._children() if self._processes is None else self._processes)

    def _dead_server(self) -> str | None:
        if len(self._servers) < len(SERVERS):  # they are still being started
            for child in self._children():
                with suppress(psutil.NoSuchProcess):
                    if child.name() in SERVERS:
                        self._servers[child.name()] = child
        for name, server in self._servers.items():
            if not is_running(server):
                why = last_error(self._log_of(name))
                return f"Ray's {name} (pid {server.pid}) on this machine has died{why and f': {why}'}"
        return None

    def _stop_watching(self) -> None:
        """Stop the watching thread before the servers are ended on purpose, unless it has found a dead server."""
        if self._failure is None:
            self._stopped.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            with self._lock:
                self._failure = problem = self._dead_server()
            if problem is not None:
                # If a server dies during the start, `__init__` cleans up and may start Ray again.
                if self._processes is not None:
                    end_processes(self._family())
                self._starts_again.wait(UNWINDING_S)
                with self._lock:
                    if self._starts_again.is_set():
                        self._starts_again.clear()
                        continue
                if self._exit_code != 0:
                    report_error(problem)
                for process in self._family():
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                self._leave_out_ray()

    def _leave_out_ray(self) -> None:
        if self._failure is not None:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            leave(self._exit_code)

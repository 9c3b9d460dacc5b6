# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Child processes for users' code on the driver's machine. They and all that they start end with the driver."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO

import psutil

from nemo_rl_moe.distributed.node_tools import module_search_path

END_LIMIT_S = 10.0
"""Seconds that a killed process may take to end."""


class ChildProcess:
    """A Python process in a separate session, with a connection to it.

    Args:
        module: Module that the process runs, and that calls `connect`. Its command line has two file descriptors for
            `connect`, and then `files`.
        output: Receives the standard output and standard error of the process.
        files: Further file descriptors that the process inherits.
        environment: Further environment variables.

    Attributes:
        connection: This end of the connection.
        is_over: Whether the process has been killed.
    """

    def __init__(
        self,
        module: str,
        output: IO[bytes] | int,
        files: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.connection, theirs = Pipe()
        reading, self._lifeline = os.pipe()
        inherited = (theirs.fileno(), reading, *files)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=inherited,
                start_new_session=True,
                env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(module_search_path())},
            )
        finally:
            theirs.close()
            os.close(reading)
        self._lock, self.is_over = threading.Lock(), False

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, limit_s: float) -> None:
        """Close the connection, and kill the process if it does not end within a limit."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        self.kill()
        self.reap()

    def kill(self) -> None:
        """Kill the process with all that it has started. Do nothing the second time."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            children = [] if self._process.returncode is not None else _children_of_stopped(self._process.pid)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for each in children:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            os.close(self._lifeline)

    def reap(self) -> None:
        """Wait for the end of a killed process, and close the connection."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        self.connection.close()

    def reason_of_end(self) -> str:
        """Wait for the end of a process that has closed its connection, and return the reason."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(END_LIMIT_S)
            return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "it has closed its connection"


def connect() -> Connection:  # pragma: no cover  (runs in other processes)
    """Return the connection of this child process to its parent. The child is killed when the parent ends."""
    for file in map(int, sys.argv[1:]):
        os.set_inheritable(file, False)  # an open copy in its children would hide the end of this process
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    return Connection(int(sys.argv[1]))


def _end_with_parent(lifeline: int) -> None:  # pragma: no cover
    os.read(lifeline, 1)  # until the parent closes its end, or dies
    os.killpg(0, signal.SIGKILL)


def _children_of_stopped(pid: int) -> list[psutil.Process]:
    """Suspend a process by SIGSTOP, and return all its descendants, in any session."""
    try:
        os.kill(pid, signal.SIGSTOP)
        return psutil.Process(pid).children(recursive=True)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return []

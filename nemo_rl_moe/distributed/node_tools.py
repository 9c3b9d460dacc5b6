# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What is done on one machine, for the processes of that machine: cores, logs, and making sure that none stays."""

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
LARGEST_TAIL_BYTES = 64 * 1024
RAY_MARKERS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes into a worker's log for its own use."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, told apart from a later one that got the same id.

    Attributes:
        pid: Process id.
        create_time: When it was started, in seconds since the epoch.
    """

    pid: int
    create_time: float

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessIdentity":
        """The identity of a process that runs now."""
        return cls(process.pid, process.create_time())

    def find(self) -> psutil.Process | None:
        """The process, or None when it has ended."""
        try:
            process = psutil.Process(self.pid)
            alive = process.create_time() == self.create_time and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the container's CPU quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_per_worker(cores: int, workers: int) -> int:
    """An equal share of a machine's cores, at least one."""
    return max(1, cores // workers)


def read_tail(path: Path | None, num_lines: int) -> str:
    """The last lines of a log file; empty when it is missing or says nothing."""
    if path is None:
        return ""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LARGEST_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.rstrip().splitlines() if not line.startswith(RAY_MARKERS)]
    return "\n".join(lines[-num_lines:])


def find_families(roots: Iterable[ProcessIdentity]) -> list[ProcessIdentity]:
    """The processes among `roots` that still run, and everything that they have started."""
    family: list[ProcessIdentity] = []
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            if process := root.find():
                family += [ProcessIdentity.of(member) for member in (process, *process.children(recursive=True))]
    return family


def end_processes(processes: Sequence[ProcessIdentity], grace_s: float, timeout_s: float = 5.0) -> list[int]:
    """Waits for processes to end and kills those that do not.

    Args:
        processes: What must be gone.
        grace_s: Seconds before SIGKILL.
        timeout_s: Seconds that SIGKILL may take.

    Returns:
        The ids of those that run even then.
    """
    running = [process for identity in processes if (process := identity.find())]
    _, stubborn = psutil.wait_procs(running, timeout=grace_s)
    for process in stubborn:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=timeout_s)
    return [identity.pid for identity in processes if identity.find()]


def dump_stacks(processes: Iterable[ProcessIdentity]) -> None:
    """Asks workers to write to their stderr where they are; they have registered `faulthandler` for this signal."""
    for identity in processes:
        with suppress(psutil.NoSuchProcess):
            if process := identity.find():
                process.send_signal(signal.SIGUSR1)

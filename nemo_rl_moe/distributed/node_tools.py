# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools for the processes of one machine: cores, ends of logs, and killing of whole families."""

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
LARGEST_TAIL_BYTES = 64 * 1024
_LONGEST_TEMPORARY = 16
RAY_MARKERS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes into a worker's log for its own use."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process that can be sent to another process, told apart from a later one with the same id.

    Attributes:
        pid: Process id.
        create_time: Start in seconds since the epoch.
    """

    pid: int
    create_time: float

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessIdentity":
        """Identity of a process that runs now."""
        return cls(process.pid, process.create_time())

    def find(self) -> psutil.Process | None:
        """The process; None when it has ended."""
        try:
            process = psutil.Process(self.pid)
            return process if process.create_time() == self.create_time and is_running(process) else None
        except psutil.NoSuchProcess:
            return None


def is_running(process: psutil.Process) -> bool:
    """False for a process that has ended, also where nobody has collected its exit code yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_frozen(process: psutil.Process) -> bool:
    """True for a process that has been stopped (SIGSTOP), and not by a debugger."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def process_states(identities: Iterable[ProcessIdentity]) -> list[str]:
    """State of each process, such as psutil.STATUS_STOPPED; empty for one that has ended."""
    states = []
    for identity in identities:
        state = ""
        with suppress(psutil.NoSuchProcess):
            if process := identity.find():
                state = str(process.status())
        states.append(state)
    return states


def ray_folder(pid: int) -> Path:
    """Temporary folder of the Ray that a process has started: sockets and logs, for its owner's eyes alone."""
    # Names of sockets are at most 107 bytes long, and Ray adds 70.
    parent = Path(tempfile.gettempdir())
    return (parent if len(str(parent)) < _LONGEST_TEMPORARY else Path("/tmp")) / f"nemo_rl_moe-ray-{pid}"


def usable_cores() -> int:
    """Number of cores that this process may use: its affinity, cut by the container's CPU quota where there is one."""
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
    """The last lines of a log file; empty when it is missing or has none."""
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


def families(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes among `roots` that run, and everything that they have started."""
    members: list[psutil.Process] = []
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            if is_running(root):
                members += [root, *root.children(recursive=True)]
    return members


def end_processes(processes: Sequence[psutil.Process], timeout_s: float = 5.0) -> None:
    """Kills processes and waits until they are gone, at most so many seconds."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout_s)


def find_families(roots: Iterable[ProcessIdentity]) -> list[ProcessIdentity]:
    """Identities of the processes among `roots` that run, and of everything that they have started."""
    running = (process for root in roots if (process := root.find()))
    found = []
    for member in families(running):
        with suppress(psutil.NoSuchProcess):
            found.append(ProcessIdentity.of(member))
    return found


def end_families(members: Iterable[ProcessIdentity], grace_s: float) -> None:
    """Waits for processes to end, and kills those that do not within so many seconds."""
    running = [process for member in members if (process := member.find())]
    _, stubborn = psutil.wait_procs(running, timeout=grace_s)
    end_processes(stubborn)

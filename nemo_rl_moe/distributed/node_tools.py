# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools for the processes of one machine: cores, module path, ends of logs, and killing of process families."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from nemo_rl_moe.errors import ConfigurationError

CGROUP_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
LARGEST_TAIL_BYTES = 64 * 1024
SHARED_MEMORY = Path("/dev/shm")
_OWN_PREFIX = "nemo_rl_moe-"
_LONGEST_TEMPORARY = 16
_ENDING_S = 5.0
MOST_THREADS = 1024
RAY_MARKERS = (":job_id:", ":actor_name:", ":task_name:")
"""Beginnings of lines that Ray writes into a worker's log for internal use."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process. The time of its creation distinguishes it from a later one with the same id."""

    pid: int
    create_time: float

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessIdentity":
        """Return the identity of a process that runs now."""
        return cls(process.pid, process.create_time())

    def find(self) -> psutil.Process | None:
        """Return the process, unless it has ended."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.create_time() == self.create_time and is_running(process):
                return process
        return None


def state_of(process: psutil.Process | None) -> str:
    """Return a state such as psutil.STATUS_STOPPED. Empty for an ended process, also if it is a zombie."""
    with suppress(psutil.NoSuchProcess):
        if process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return str(process.status())
    return ""


def is_running(process: psutil.Process) -> bool:
    """Return False for an ended process, also if it is a zombie."""
    return state_of(process) != ""


def process_states(identities: Iterable[ProcessIdentity]) -> list[str]:
    """Return the state of each process, by `state_of`."""
    return [state_of(identity.find()) for identity in identities]


def ray_folder(pid: int) -> Path:
    """Return the temporary folder for a process's Ray, with sockets and logs that only its owner can read."""
    # Paths of sockets are limited to 107 bytes, and Ray adds 70.
    parent = Path(tempfile.gettempdir())
    return (parent if len(str(parent)) < _LONGEST_TEMPORARY else Path("/tmp")) / f"nemo_rl_moe-ray-{pid}"


def folder_of_this_process(parent: Path, purpose: str) -> Path:
    """Make and return a folder named by machine and process. Remove such folders of processes that have ended."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_folders_of_the_dead(parent, purpose)
    prefix = f"{_OWN_PREFIX}{purpose}-{socket.gethostname()}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def remove_folders_of(pids: Iterable[int]) -> None:
    """Remove the temporary folders of killed processes, and of other processes of this program that have ended."""
    killed = set(pids)
    for pid in killed:
        shutil.rmtree(ray_folder(pid), ignore_errors=True)
    for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY):
        _remove_folders_of_the_dead(parent, "*", killed)


def _remove_folders_of_the_dead(parent: Path, purpose: str, killed: Collection[int] = ()) -> None:
    """Remove folders of `folder_of_this_process` whose process has ended. Processes in `killed` count as ended."""
    for folder in parent.glob(f"{_OWN_PREFIX}{purpose}-{socket.gethostname()}-*-*"):
        pid = folder.name.rsplit("-", 2)[1]
        if pid.isdecimal() and (int(pid) in killed or not psutil.pid_exists(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def module_search_path() -> list[str]:
    """Return `sys.path` with absolute folders, so that other processes import the same code."""
    return [str(Path(folder).absolute()) for folder in sys.path]


def usable_cores() -> int:
    """Return the number of cores that this process may use, by affinity and the container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CGROUP_CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


THREADS = "OMP_NUM_THREADS"
SHORTEST_WAIT = {"OMP_WAIT_POLICY": "passive"}
"""Environment variables with which OpenMP's waiting threads sleep. By default they spin, and so take the cores from the
threads that they wait for: on two cores with a load of eight, two threads took 100 times as long as one."""


def threads_per_worker(cores: int, workers: int, chosen: int | None = None) -> int:
    """Return the number of threads chosen by the user, or else an equal share of a machine's cores, at least one."""
    return chosen or max(1, cores // workers)


def chosen_threads(environment: Mapping[str, str]) -> int | None:
    """Return the user's number of threads in `OMP_NUM_THREADS`, if it is set.

    If it is a list, which is for nested regions, return the first number.
    """
    value = environment.get(THREADS, "").strip()
    if not value:
        return None
    first = value.partition(",")[0].strip()
    if not first.isdecimal() or not 1 <= int(first) <= MOST_THREADS:
        raise ConfigurationError(
            f"the environment's {THREADS}: got {value!r}, expected a number from 1 to {MOST_THREADS}"
        )
    return int(first)


def read_tail(path: Path | None, num_lines: int) -> str:
    """Return the last lines of a log file. Empty if it is missing."""
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
    """Return the running processes among `roots`, and all their descendants."""
    members: list[psutil.Process] = []
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            if is_running(root):
                members += [root, *root.children(recursive=True)]
    return members


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait some seconds for their end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_ENDING_S)


def find_families(roots: Iterable[ProcessIdentity]) -> list[ProcessIdentity]:
    """Return the identities of the running processes among `roots`, and of all their descendants."""
    running = (process for root in roots if (process := root.find()))
    found = []
    for member in families(running):
        with suppress(psutil.NoSuchProcess):
            found.append(ProcessIdentity.of(member))
    return found


def end_families(members: Iterable[ProcessIdentity], grace_s: float) -> None:
    """Wait for processes to end, and kill them after `grace_s` seconds."""
    running = [process for member in members if (process := member.find())]
    _, stubborn = psutil.wait_procs(running, timeout=grace_s)
    end_processes(stubborn)

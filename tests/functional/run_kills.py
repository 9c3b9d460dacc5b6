# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""For tests that kill parts of a run: its processes by what they do, and waiting until all of them are gone."""

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from nemo_rl_moe.distributed.run_process import WATCHER_NAME
from nemo_rl_moe.rollouts.agents import worker as agent_worker
from tests.functional import sft_runs
from tests.support.rewards_of_tests import ENGINE_TITLE

WORKER_TITLE = "ray::WorkerProcess"
DRIVER_OPTION = "--run-id"
SERVERS = ("gcs_server", "raylet")
LOOPBACK = {"127.0.0.1", "::1"}
"""Addresses that nobody outside of the machine reaches."""
POLL_S = 0.05
END_POLL_S = 0.2


class RunHasEndedError(AssertionError):
    """Something was waited for that a run was to do, and it has ended before."""


class Run:
    """A command that trains, running, with what it prints in files.

    Args:
        command: The command.
        folder: The working folder; gets the files `printed` and `errors`.
        environment: Variables in addition to those of every run.
        nodes: The process that has started the Ray nodes which the run joins; None: it starts a Ray of its own.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        nodes: psutil.Process | None = None,
    ):
        self.printed_path, self.errors_path = folder / "printed", folder / "errors"
        with self.printed_path.open("w") as printed, self.errors_path.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=printed,
                stderr=errors,
                env=sft_runs.environment() | dict(environment or {}),
                cwd=folder,
                start_new_session=True,
                preexec_fn=_heed_signals,
            )
        self._seen: dict[psutil.Process, None] = {psutil.Process(self.process.pid): None}
        self._nodes = nodes

    @property
    def printed(self) -> str:
        """The output up to now."""
        return self.printed_path.read_text()

    @property
    def errors(self) -> str:
        """The lines on stderr up to now."""
        return self.errors_path.read_text()

    @property
    def process_ids(self) -> list[int]:
        """Ids of all processes that have been seen, also those that have ended."""
        return [process.pid for process in self._seen]

    def family(self) -> list[psutil.Process]:
        """Every process of the run that runs now: also those seen before whose parents have gone since."""
        self._seen |= dict.fromkeys(_descendants(list(self._seen)))
        return sft_runs.running(list(self._seen)) + self._workers_of_nodes()

    def _workers_of_nodes(self) -> list[psutil.Process]:
        return [process for process in self._below_nodes() if title_of(process).startswith(WORKER_TITLE)]

    def _below_nodes(self) -> list[psutil.Process]:
        return sft_runs.running(self._nodes.children(recursive=True)) if self._nodes is not None else []

    def listening(self) -> set[tuple[str, str]]:
        """Addresses on which its processes listen now, each with the process's name."""
        return {(address, name) for address, _, name in self._listeners()}

    def ports(self) -> set[int]:
        """Ports on which its processes listen now."""
        return {port for _, port, _ in self._listeners()}

    def _listeners(self) -> list[tuple[str, int, str]]:
        """Address, port and process's name of each socket on which its processes listen."""
        names = {}
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                names[process.pid] = process.name()
        return [
            (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port, names[connection.pid])
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid in names
        ]

    def find(self, role: str) -> list[psutil.Process]:
        """Return the processes of a role: driver, watcher, supervisor, worker, engine, agent, gcs_server, raylet."""
        found = []
        for process in dict.fromkeys([*self.family(), *self._below_nodes()]):
            with suppress(psutil.NoSuchProcess):
                if self._role(process) == role:
                    found.append(process)
        return found

    def _role(self, process: psutil.Process) -> str | None:
        command = process.cmdline()
        if process.name() in SERVERS:
            return process.name()
        if process.name() == WATCHER_NAME:
            return "watcher"
        if command and command[0].startswith(WORKER_TITLE):
            return "worker"
        if command and command[0].startswith(ENGINE_TITLE):
            return "engine"
        if agent_worker.__name__ in command:
            return "agent"
        if process.pid == self.process.pid:
            return "supervisor" if self._is_supervised() else "driver"
        return "driver" if DRIVER_OPTION in command and process.ppid() == self.process.pid else None

    def _is_supervised(self) -> bool:
        return any(DRIVER_OPTION in child.cmdline() for child in psutil.Process(self.process.pid).children())

    def wait_for(self, condition: Callable[[], object], limit_s: float, poll_s: float = POLL_S) -> None:
        """Waits until something is true, and fails where the run ends before."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise RunHasEndedError(f"the run has ended:\n{self.printed}\n{self.errors}")
            assert time.monotonic() < deadline, f"still waiting:\n{self.printed}\n{self.errors}"
            time.sleep(poll_s)

    def wait_for_text(self, text: str, limit_s: float = 400.0) -> None:
        """Waits until the run has printed something."""
        self.wait_for(lambda: text in self.printed, limit_s)

    def wait_for_end(self, limit_s: float) -> int:
        """Its exit code; every process of it must be gone when it has ended."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.family()}\n{self.printed}\n{self.errors}"
            self.family()
            time.sleep(END_POLL_S)
        return self.process.returncode

    def wait_until_nothing_runs(self, limit_s: float) -> None:
        """Fails where a process of the run is still there after so many seconds."""
        deadline = time.monotonic() + limit_s
        while left := self.family():
            assert time.monotonic() < deadline, (
                f"left behind: {[(each.pid, each.ppid(), title_of(each)) for each in left]}"
            )
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kills whatever is left of it."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()


def _heed_signals() -> None:
    """Reset what a process inherits: a shell's background job ignores SIGINT, and one under `nohup` SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _descendants(roots: list[psutil.Process]) -> list[psutil.Process]:
    """Everything below processes, out of one look at all processes: psutil looks once for each root."""
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        children[process.info["ppid"]].append(process)
    found = []
    waiting = [root for root in roots if root.is_running()]
    while waiting:
        below = children.pop(waiting.pop().pid, [])
        found += below
        waiting += below
    return found


def ports_in_use(ports: Collection[int]) -> set[int]:
    """Return those of the ports on which some process of the machine listens."""
    listening = {each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    return listening & set(ports)


def processes_with(name: str, value: str) -> list[int]:
    """Return the ids of all processes that were started with a variable of their environment, whoever their parents."""
    variable, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def title_of(process: psutil.Process) -> str:
    """The first word of its command line, which Ray's workers set; empty for one that has ended."""
    with suppress(psutil.NoSuchProcess):
        return next(iter(process.cmdline()), "")
    return ""


@contextmanager
def running(
    command: list[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    nodes: psutil.Process | None = None,
) -> Iterator[Run]:
    """Starts a command, and leaves nothing of it, whatever happens; arguments as of `Run`."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(command, folder, environment, nodes)
    try:
        yield run
    finally:
        run.end()

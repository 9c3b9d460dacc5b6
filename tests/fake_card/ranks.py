# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function on the ranks of a job, each with a fake card: `run_on_cards`, beside `gloo_ranks.run_ranks`.

Importing torch and Megatron-Core takes long, so the processes of a job serve the next one too. A call that fails costs
them.
"""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fake_card.environment import REPOSITORY, card_environment
from tests.support.gloo_ranks import RankError

_GRACE_S = 20.0


@dataclass(frozen=True)
class _Team:
    """The processes of a job.

    Attributes:
        folder: Where they share memory, and write what they print.
    """

    processes: list[subprocess.Popen[bytes]]
    connections: list[Connection]
    folder: Path

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def printed(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.log").read_text(errors="replace")[-6000:]


_waiting: dict[tuple[int, tuple[tuple[str, str], ...]], _Team] = {}


def run_on_cards(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 400.0,
    grace_s: float = _GRACE_S,
    **environment: str,
) -> list[Any]:
    """Call a module-level function on every rank of a job.

    Args:
        function: Finds its rank in the environment. What it takes and returns must be picklable and no tensor.
        world_size: Number of ranks.
        arguments: The same for every rank.
        timeout_s: After so long the ranks are stopped.
        grace_s: Seconds that the other ranks have, once one has failed.
        environment: Further variables of the processes, such as FAKE_CARD_GB.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised, died, or did not answer in time.
    """
    key = (world_size, tuple(sorted(environment.items())))
    team = _waiting.pop(key, None) or _start(world_size, environment)
    problems = ["no answer was waited for"]
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for connection in team.connections:
            connection.send((function.__module__, function.__name__, {"MASTER_PORT": port}, arguments))
        answers = _collect(team, time.monotonic() + timeout_s, grace_s)
        problems = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
    finally:
        if problems or os.environ.get("TESTS_FRESH_RANKS") == "1":
            team.end()
        else:
            _waiting[key] = team
    if problems:
        raise RankError("\n".join(problems))
    return [answer for _, answer in answers]


def _start(world_size: int, changes: dict[str, str]) -> _Team:
    folder = Path(tempfile.mkdtemp(prefix="fake_card_", dir="/dev/shm"))
    team = _Team([], [], folder)
    for rank in range(world_size):
        environment = card_environment(folder, world_size, **changes) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
        }
        ours, theirs = socket.socketpair()
        with theirs, (folder / f"rank_{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", "tests.fake_card.rank", str(theirs.fileno())]
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()], stdout=log, stderr=log
            )
        team.processes.append(process)
        team.connections.append(Connection(ours.detach()))
    return team


def _collect(team: _Team, deadline: float, grace_s: float) -> Sequence[tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < len(team.connections):
        waiting = {rank: each for rank, each in enumerate(team.connections) if rank not in answers}
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        for rank, connection in waiting.items():
            if connection in ready:
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = (False, f"died without an answer; it printed\n{team.printed(rank)}")
            elif not ready:
                answers[rank] = (False, f"no answer in time; it was in\n{_stacks(team, rank)}")
            if rank in answers and not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + grace_s)
    return [answers[rank] for rank in range(len(team.connections))]


def _stacks(team: _Team, rank: int) -> str:
    with suppress(ProcessLookupError):
        team.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
    return team.printed(rank)


def end_waiting_ranks() -> None:
    """End the processes that wait for a call."""
    while _waiting:
        _waiting.popitem()[1].end()


atexit.register(end_waiting_ranks)

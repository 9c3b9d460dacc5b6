# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real processes that run one function as the ranks of a job.

Megatron-Core takes many seconds to import, so it is imported once, in a server process from which the ranks of every
call are forked. Each call has fresh ranks: process groups leave threads behind, and Megatron-Core keeps global state.
"""

import faulthandler
import importlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOADED = ["tests.support.rank_imports"]
_GRACE_S = 5.0


class RankError(AssertionError):
    """A rank raised, died or hung; the text holds each rank's traceback."""


@dataclass(frozen=True)
class _Call:
    search_path: list[str]
    module: str
    function: str
    environment: dict[str, str]
    arguments: tuple[Any, ...]
    stack_file: str


@dataclass(frozen=True)
class _Failure:
    text: str


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection
    stack_file: Path


def _run_call(call: _Call, connection: Connection) -> None:
    """What a rank's process does: run the function and send what it returned."""
    with open(call.stack_file, "w") as stacks:  # noqa: PTH123  (one process start a test: no more imports)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        sys.path[:] = call.search_path
        os.environ.update(call.environment)
        try:
            function = getattr(importlib.import_module(call.module), call.function)
            connection.send(function(*call.arguments))
        # A test's pytest.fail, or a checkpoint error, is no Exception.
        except BaseException:
            connection.send(_Failure(traceback.format_exc()))
        # The answer is sent; nothing is worth waiting for peers that still need this rank.
        os._exit(0)


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """Calls a module-level function on every rank of a job.

    Args:
        function: Finds its rank in the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). What it takes and
            returns must be picklable and no tensor (numpy arrays are fine).
        world_size: Number of ranks.
        arguments: The same for every rank.
        timeout_s: After so long the ranks are stopped.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised, died, or did not answer in time.
    """
    with tempfile.TemporaryDirectory(prefix="gloo_ranks_") as folder:
        ranks = _start(function, world_size, arguments, Path(folder))
        try:
            answers = _collect(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.connection.close()
    problems = [
        f"rank {index}: {answer.text}" for index, answer in sorted(answers.items()) if isinstance(answer, _Failure)
    ]
    if problems:
        raise RankError("\n".join(problems))
    return [answers[index] for index in range(world_size)]


def _start(function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], folder: Path) -> list[_Rank]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port, ranks = _free_port(), []
    # The server starts with the first rank; it takes the environment, not this process's module search path.
    inherited = os.environ.copy()
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1")
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            stack_file = folder / f"rank_{rank}"
            call = _Call(
                list(sys.path), function.__module__, function.__name__, environment, arguments, str(stack_file)
            )
            process = context.Process(target=_run_call, args=(call, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours, stack_file))
    finally:
        os.environ.clear()
        os.environ.update(inherited)
    return ranks


def _collect(ranks: Sequence[_Rank], deadline: float) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        waiting = {index: rank.connection for index, rank in enumerate(ranks) if index not in answers}
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            answers |= {index: _Failure(_stacks_of(ranks[index])) for index in waiting}
        for index, connection in waiting.items():
            if connection not in ready:
                continue
            try:
                answers[index] = connection.recv()
            except (EOFError, OSError):
                answers[index] = _Failure("died without an answer")
            if isinstance(answers[index], _Failure):
                # Its peers may wait for it in a collective.
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return answers


def _stacks_of(rank: _Rank) -> str:
    if rank.process.is_alive() and rank.process.pid is not None and rank.stack_file.exists():
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return f"no answer in time; it was in\n{rank.stack_file.read_text()}"
    return "no answer in time"


def _free_port() -> int:
    # Below the range that outgoing connections take theirs from, so that none of them gets it before rank 0 listens.
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port

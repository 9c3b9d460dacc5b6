# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real processes that run one function as the ranks of a job.

Megatron-Core takes many seconds to import, so it is imported once, in a server process from which ranks are forked. A
rank's process is used again by the next call, after `rank_state` has put its state back; a call that fails costs the
processes that it ran in, and a call with `fresh=True` has some of its own.

What the ranks say to each other must be what NCCL would carry too: `nccl_rules`.

Megatron-Core looks for Transformer Engine when it is imported. Ranks that have it (a stand-in in plain torch, under the
names and with the marks of the real) are processes of their own, which import both anew and are used again like others.
"""

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PRELOADED = ["tests.support.rank_imports"]
_GRACE_S = 5.0
# Threads of process groups that are gone but not yet collected; beyond so many the process is not used again.
_MOST_THREADS = 400


class RankError(AssertionError):
    """A rank raised, died or hung; the text holds each rank's traceback."""


@dataclass(frozen=True)
class _Call:
    search_path: list[str]
    module: str
    function: str
    environment: dict[str, str]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Failure:
    text: str


@dataclass(frozen=True)
class _Answer:
    value: Any
    record: Any


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection
    stack_file: Path

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stack_file.unlink(missing_ok=True)


# Of this process (a pytest-xdist worker has its own): ranks that wait for a call, by how they were prepared.
_idle: dict[str, list[_Rank]] = {}


def _serve_calls(connection: Connection, stack_file: str, prepared_by: str) -> None:
    """Run functions, one after the other, and send what each returned."""
    from tests.support import nccl_rules, rank_state

    first_on_path: list[str] = importlib.import_module(prepared_by).prepare() if prepared_by else []

    with open(stack_file, "w") as stacks:  # noqa: PTH123  (one process start a test: no more imports)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        state = rank_state.ProcessState()
        while True:
            try:
                call = connection.recv()
            except (EOFError, OSError):
                break
            # A test's pytest.fail, or a checkpoint error, is no Exception; nor may arguments that are not understood
            # keep the caller waiting.
            except BaseException:
                connection.send(_Failure(traceback.format_exc()))
                break
            sys.path[:] = [*first_on_path, *call.search_path]
            try:
                function = getattr(importlib.import_module(call.module), call.function)
                state.note_new_modules()
                os.environ.update(call.environment)
                with nccl_rules.recorded() as record:
                    answer = function(*call.arguments)
                connection.send(_Answer(answer, record))
            except BaseException:
                connection.send(_Failure(traceback.format_exc()))
                break
            del call, function, answer, record
            state.restore()
            connection.send(rank_state.num_threads() <= _MOST_THREADS)
        # The answer is sent; nothing is worth waiting for peers that still need this rank.
        os._exit(0)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 280.0,
    fresh: bool = False,
    prepared_by: str = "",
) -> list[Any]:
    """Call a module-level function on every rank of a job.

    Args:
        function: Finds its rank in the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). What it takes and
            returns must be picklable and no tensor (numpy arrays are fine).
        world_size: Number of ranks.
        arguments: The same for every rank.
        timeout_s: After so long the ranks are stopped.
        fresh: Run in processes that have run nothing yet and will run nothing else, for functions that measure memory
            or threads.
        prepared_by: A module whose `prepare` the ranks' processes have called before all else; it returns what is to
            stand first on their module search path.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised, died, or did not answer in time; or NCCL would not have carried what they said.
    """
    from torch.distributed import TCPStore

    from tests.support.rank_state import problems_of_job

    fresh = fresh or _ALWAYS_FRESH
    ranks = _start(world_size, prepared_by) if fresh else _take(world_size, prepared_by)
    call = _Call(list(sys.path), function.__module__, function.__name__, {}, arguments)
    problems = ["no answer was waited for"]
    # Ranks meet in a store that listens already: one of rank 0's own may come after the others have asked for it, and
    # who has asked in vain waits for up to a second. It lives until they have answered.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        _send(call, ranks, store.port)
        answers = _collect(ranks, time.monotonic() + timeout_s)
        problems = [
            f"rank {index}: {answer.text}" for index, answer in sorted(answers.items()) if isinstance(answer, _Failure)
        ] or problems_of_job([answers[index].record for index in range(world_size)])
    finally:
        if fresh or problems:
            for rank in ranks:
                rank.end()
        else:
            _idle.setdefault(prepared_by, []).extend(ranks)
    if problems:
        raise RankError("\n".join(problems))
    return [answers[index].value for index in range(world_size)]


# For comparing both ways: results must be the same.
_ALWAYS_FRESH = os.environ.get("TESTS_FRESH_RANKS") == "1"


def _take(count: int, prepared_by: str) -> list[_Rank]:
    """Return the ranks that wait, once they have put their state back, and new ones where there are too few."""
    taken: list[_Rank] = []
    waiting = _idle.get(prepared_by, [])
    while waiting and len(taken) < count:
        rank = waiting.pop(0)
        try:
            may_be_used = rank.connection.poll(200.0) and rank.connection.recv()
        except (EOFError, OSError):
            may_be_used = False
        if may_be_used:
            taken.append(rank)
        else:
            rank.end()
    return taken + _start(count - len(taken), prepared_by)


def end_idle_ranks() -> None:
    for waiting in _idle.values():
        while waiting:
            waiting.pop().end()


atexit.register(end_idle_ranks)


def _send(call: _Call, ranks: Sequence[_Rank], port: int) -> None:
    for index, rank in enumerate(ranks):
        call.environment.update(
            RANK=str(index),
            WORLD_SIZE=str(len(ranks)),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        rank.connection.send(call)


def _start(count: int, prepared_by: str) -> list[_Rank]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ranks: list[_Rank] = []
    # The server starts with the first rank; it takes the environment, not this process's module search path.
    inherited = os.environ.copy()
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1")
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            file, stack_file = tempfile.mkstemp(prefix="gloo_rank_")
            os.close(file)
            process = context.Process(target=_serve_calls, args=(theirs, stack_file, prepared_by), daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours, Path(stack_file)))
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


STAND_IN = Path(__file__).resolve().parent / "transformer_engine_stand_in"

# What knows Megatron-Core, directly or through others.
_PACKAGES = ("megatron", "nemo_rl_moe.models.megatron", "nemo_rl_moe.models.policy", "tests.support")
_KEPT = (
    "tests.support",
    "tests.support.nccl_rules",
    "tests.support.rank_state",
    "tests.support.rank_imports",
    __name__,
)


class _CudaIsTheHost(TorchFunctionMode):
    """Makes tensors on the host that are asked for on a GPU, which Megatron-Core names with fused permutation and with
    context parallelism."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return function(*args, **kwargs)


def run_ranks_with_engine(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 280.0
) -> list[Any]:
    """`run_ranks` on ranks where Transformer Engine is installed and used as beside a GPU."""
    return run_ranks(function, world_size, *arguments, timeout_s=timeout_s, prepared_by=__name__)


def prepare() -> list[str]:
    """Return what a rank's process does first: imports all anew, with Transformer Engine to be found.

    Returns:
        Where it is to be found from now on.
    """
    for name in list(sys.modules):
        if name not in _KEPT and any(name == package or name.startswith(f"{package}.") for package in _PACKAGES):
            del sys.modules[name]
    sys.path.insert(0, str(STAND_IN))
    importlib.invalidate_caches()
    # A process on CPUs hides the package, but for one that is imported before.
    sys.modules.pop("transformer_engine", None)
    importlib.import_module("transformer_engine")
    from nemo_rl_moe.models.megatron.model import transformer_config, transformer_engine, transformer_problems

    # The configuration is that of a GPU, in every field; how Megatron-Core runs on a host stays corrected.
    for module in (transformer_config, transformer_engine, transformer_problems):
        module.cpu_backend = SimpleNamespace(ACTIVE=False)
    importlib.reload(importlib.import_module("tests.support.rank_imports"))
    _CudaIsTheHost().__enter__()
    return [str(STAND_IN)]

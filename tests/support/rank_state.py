# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one test must not leave to the next, and what their operations would come to under NCCL.

A rank's process is put back into the state of a fresh one. What NCCL would mix up, or wait for without end, is found in
the ranks' notes, which meet as NCCL's kernels would: a rank goes on when all that take part in its operation have come
to it. With gloo, messages of one rank do not wait for each other.
"""

import functools
import gc
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support.nccl_rules import Group, Operation, Record

# Modules whose names, and whose classes' attributes, are put back; pytest imports a test file by its own name.
_ROOMS = ("megatron.", "nemo_rl_moe.", "tests.", "test_")
# Of these only functions: the rest is torch's own record of process groups, which it clears itself.
_TORCH_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGXFSZ, signal.SIGUSR2)
_ABSENT = object()

Container = dict[Any, Any] | list[Any] | set[Any]


class ProcessState:
    """What a fresh process has, noted once and put back after each call.

    Process groups are left and Megatron-Core's parallel state is destroyed; environment variables, random number
    generators, signal handlers, limits, filters of warnings and levels of logging are set as they were, and so is every
    name in modules of Megatron-Core, of the package and of the tests, in their classes, and in dicts, lists and sets
    that these names stand for. Caches of functions are emptied.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()  # noqa: PTH109  (no Path: this is set again as it is)
        self._signals = {number: signal.getsignal(number) for number in _SIGNALS}
        self._file_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._warnings = list(warnings.filters)
        self._levels: dict[str, int] = {}
        self._restore_logging()
        self._random = random.getstate()
        self._numpy_random = np.random.get_state()
        self._torch_random = torch.get_rng_state()
        self._modules: set[str] = set()
        self._names: dict[int, tuple[Any, dict[str, Any]]] = {}
        # Of each of these owners, all its names, in the form that they are compared in.
        self._known: dict[int, frozenset[str]] = {}
        self._cached_functions: list[functools._lru_cache_wrapper[Any]] = []
        self._containers: dict[int, tuple[Container, Container]] = {}
        self.note_new_modules()

    def note_new_modules(self) -> bool:
        """Note the names of modules that were imported since the last time. True if there are any."""
        new = [name for name in list(sys.modules) if name.startswith(_ROOMS) and name not in self._modules]
        for name in new:
            self._modules.add(name)
            for owner in _owners(sys.modules[name]):
                self._note(owner)
        if not self._modules.issuperset(_TORCH_MODULES):
            self._modules.update(_TORCH_MODULES)
            for name in _TORCH_MODULES:
                functions = {key: value for key, value in vars(sys.modules[name]).items() if callable(value)}
                self._names[id(sys.modules[name])] = (sys.modules[name], functions)
        return bool(new)

    def _note(self, owner: Any) -> None:
        names = {name: value for name, value in vars(owner).items() if not _is_left_alone(name, value)}
        self._names[id(owner)] = (owner, names)
        self._known[id(owner)] = frozenset(vars(owner))
        for value in names.values():
            if isinstance(value, functools._lru_cache_wrapper):
                self._cached_functions.append(value)
            if type(value) in (dict, list, set):
                self._containers[id(value)] = (value, value.copy())

    def restore(self) -> None:
        groups = _leave_process_groups()
        has_new_modules = any(name.startswith(_ROOMS) and name not in self._modules for name in list(sys.modules))
        for key, (owner, names) in self._names.items():
            _restore_names(owner, names, self._known.get(key))
        for function in self._cached_functions:
            function.cache_clear()
        for container, items in self._containers.values():
            if not _same_items(container, items):
                _restore_items(container, items, keep_additions=has_new_modules)
        self.note_new_modules()
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if resource.getrlimit(resource.RLIMIT_FSIZE) != self._file_limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._file_limit)
        warnings.filters[:] = self._warnings  # type: ignore[index]
        self._restore_logging()
        random.setstate(self._random)
        np.random.set_state(self._numpy_random)
        torch.set_rng_state(self._torch_random)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        # Models and process groups refer to themselves; groups keep threads until they are collected.
        gc.collect()
        # Closing a group waits a hundredth of a second for each connection, and keeps no processor busy meanwhile.
        threading.Thread(target=groups.clear, daemon=True).start()

    def _restore_logging(self) -> None:
        known = logging.root.manager.loggerDict
        for name, logger in [("", logging.root), *known.items()]:
            if isinstance(logger, logging.Logger):
                level = self._levels.setdefault(name, logger.level)
                if logger.level != level:
                    logger.setLevel(level)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _owners(module: ModuleType) -> Iterator[Any]:
    """Yield the module and the classes that it defines."""
    yield module
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value


def _is_left_alone(name: str, value: Any) -> bool:
    return (name.startswith("__") and name.endswith("__")) or name == "_abc_impl" or isinstance(value, ModuleType)


def _restore_names(owner: Any, names: dict[str, Any], known: frozenset[str] | None) -> None:
    """Put an owner's names back, and remove those that it did not have unless nothing is known about that."""
    now = vars(owner)
    for name, value in names.items():
        if now.get(name, _ABSENT) is not value:
            setattr(owner, name, value)
    if known is not None and not now.keys() <= known:
        for name in [each for each, value in now.items() if each not in known and not _is_left_alone(each, value)]:
            delattr(owner, name)


def _same_items(container: Container, items: Container) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, dict) and isinstance(items, dict):
        return all(items.get(key, _ABSENT) is value for key, value in container.items())
    if isinstance(container, list):
        return all(first is second for first, second in zip(container, items, strict=True))
    return container == items


def _restore_items(container: Any, items: Any, *, keep_additions: bool) -> None:
    """Put a container's items back; what importing has added to a registry stays: a module is not imported again."""
    if keep_additions and isinstance(container, dict):
        items.update({key: value for key, value in container.items() if key not in items})
    container.clear()
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)


# Process groups that `keep_process_groups` has kept.
_kept: list[Any] = []


def keep_process_groups() -> None:
    _kept.extend(distributed_c10d._world.pg_map)


def _leave_process_groups() -> list[Any]:
    """Leave them; give the groups, which are closed when the list is emptied."""
    from megatron.core import parallel_state

    keep_process_groups()
    groups = _kept.copy()
    _kept.clear()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    return groups


def problems_of_job(records: Sequence[Record]) -> list[str]:
    """Return the faults that NCCL would have refused, mixed up or waited for in vain, in words; empty where all is
    well.

    Args:
        records: Of each rank, in rank order.
    """
    faults = [f"rank {rank}: {fault}" for rank, record in enumerate(records) for fault in record.faults]
    return faults or _Meeting([record.operations for record in records]).problems()


class _Meeting:
    """The ranks' operations one after the other, each done when all that take part have come to it."""

    def __init__(self, operations: Sequence[Sequence[Operation]]):
        self._left = [deque(_batches(of_rank)) for of_rank in operations]
        self._open: list[list[Operation]] = [[] for _ in operations]
        # Who waits: in a collective by group, and for a message by group and both ends.
        self._collectives: dict[Group, dict[int, Operation]] = {}
        self._messages: dict[tuple[Group, int, int], tuple[deque[Operation], deque[Operation]]] = {}
        self._found: list[str] = []

    def problems(self) -> list[str]:
        """Run to the end; the first few of what differs, and who waits for whom if that is not the end."""
        ready = deque(range(len(self._left)))
        while ready and len(self._found) < _MOST_PROBLEMS:
            rank = ready.popleft()
            while not self._open[rank] and self._left[rank]:
                self._open[rank] = list(self._left[rank].popleft())
                for operation in list(self._open[rank]):
                    ready.extend(each for each in self._arrive(rank, operation) if each != rank)
        if not self._found and any(self._open):
            self._found.append("\n  ".join(["NCCL would wait for ever:", *self._who_waits()]))
        return self._found

    def _arrive(self, rank: int, operation: Operation) -> list[int]:
        """Return a rank comes to an operation. Gives the ranks that may go on."""
        if operation.peer is None:
            waiting = self._collectives.setdefault(operation.group, {})
            waiting[rank] = operation
            if len(waiting) < len(operation.group.ranks):
                return []
            del self._collectives[operation.group]
            return self._finish(waiting)
        is_send = operation.name == "send"
        ends = (rank, operation.peer) if is_send else (operation.peer, rank)
        queues = self._messages.setdefault((operation.group, *ends), (deque(), deque()))
        queues[0 if is_send else 1].append(operation)
        if not all(queues):
            return []
        sent, received = (queue.popleft() for queue in queues)
        return self._finish({ends[0]: sent, ends[1]: received})

    def _finish(self, met: dict[int, Operation]) -> list[int]:
        self._found += _differences(met)
        for rank, operation in met.items():
            self._open[rank] = [each for each in self._open[rank] if each is not operation]
        return [rank for rank in met if not self._open[rank]]

    def _who_waits(self) -> Iterator[str]:
        for rank, waiting in enumerate(self._open):
            yield f"rank {rank}: {'; '.join(map(str, waiting))}" if waiting else f"rank {rank} has come to its end"


_MOST_PROBLEMS = 5


def _batches(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Yield the operations that begin together: messages of one batch, or one alone."""
    last: list[Operation] = []
    for operation in operations:
        if last and (operation.batch is None or operation.batch != last[-1].batch):
            yield last
            last = []
        last.append(operation)
    if last:
        yield last


def _differences(met: dict[int, Operation]) -> list[str]:
    """Return the differences between what those that take part in one operation give."""
    (first_rank, first), *others = sorted(met.items())
    is_message = first.peer is not None
    for rank, other in others:
        if (not is_message and other.name != first.name) or other.alike != first.alike:
            return [f"ranks differ:\n  rank {first_rank}: {first}\n  rank {rank}: {other}"]
    if first.sent:
        members = first.group.ranks
        for receiver, its in met.items():
            for place, sender in enumerate(members):
                sent, expected = met[sender].sent[members.index(receiver)], its.received[place]
                if sent != expected:
                    return [
                        f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}:\n"
                        f"  rank {sender}: {met[sender]}\n  rank {receiver}: {its}"
                    ]
    return []


def take_problems(folder: Path) -> list[str]:
    """`problems_of_job` of every job that was recorded into a folder, which is emptied."""
    jobs: dict[str, dict[int, Record]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        job, _, rank = path.stem.partition("-")
        record = jobs.setdefault(job, {})[int(rank)] = Record()
        for kind, item in map(json.loads, path.read_text().splitlines()):
            if kind == "fault":
                record.faults.append(item)
            else:
                name, (group, ranks), place, alike, *others = item
                named = tuple((key, value) for key, value in alike)
                record.operations.append(Operation(name, Group(group, tuple(ranks)), place, named, *others))
        path.unlink()
    return [problem for job in jobs.values() for problem in problems_of_job([job[rank] for rank in sorted(job)])]

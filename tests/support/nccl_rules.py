# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules of NCCL for ranks that talk over gloo: what it would refuse raises, all else is noted.

Every collective and message of torch.distributed passes through a method of `ProcessGroup`; inside `recorded`, these
check what they are given and note it, for `rank_state` to lay the ranks' notes side by side. gloo is more patient: it
takes tensors and types that NCCL does not know.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import ReduceOp, distributed_c10d

TYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)
"""Types of elements that torch hands to NCCL; others (int16, the larger unsigned ones, complex) it refuses."""

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_REDUCTIONS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)

# What all members must give alike, by method: the tensors among the arguments whose shapes count.
_ALIKE: dict[str, Callable[..., Sequence[torch.Tensor]]] = {
    "allreduce": lambda tensors, *_: tensors,
    "allreduce_coalesced": lambda tensors, *_: tensors,
    "broadcast": lambda tensors, *_: tensors,
    "reduce": lambda tensors, *_: tensors,
    "allgather": lambda outputs, *_: outputs[0],
    "_allgather_base": lambda _, tensor, *__: [tensor],
    "all_gather_single": lambda _, tensor, *__: [tensor],
    "allgather_into_tensor_coalesced": lambda _, tensors, *__: tensors,
    "all_gather_single_coalesced": lambda _, tensors, *__: tensors,
    "reduce_scatter": lambda _, inputs, *__: inputs[0],
    "_reduce_scatter_base": lambda tensor, *_: [tensor],
    "reduce_scatter_single": lambda tensor, *_: [tensor],
    "reduce_scatter_tensor_coalesced": lambda tensors, *_: tensors,
    "reduce_scatter_single_coalesced": lambda tensors, *_: tensors,
    "gather": lambda _, tensors, *__: tensors,
    "scatter": lambda tensors, *_: tensors,
    "barrier": lambda *_: [],
    "set_timeout": lambda *_: [],
}
_EXCHANGES = ("alltoall", "alltoall_base", "all_to_all_single")
_MESSAGES = ("send", "recv")
_REFUSED = {
    "monitored_barrier": "gloo alone has it",
    "recv_anysource": "it cannot receive from whoever sends first",
}


class NcclRuleError(AssertionError):
    """What NCCL would refuse, with the place that asked for it."""


@dataclass(frozen=True)
class Group:
    """A process group: the name that its members know it by, and their global ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One call as a rank made it.

    Attributes:
        name: The method of `ProcessGroup`.
        group: Whose.
        place: File and line that made the call.
        alike: What all members must give alike: type of elements, shapes, reduction, root.
        sent: Elements for each member, where these may differ.
        received: Elements from each member.
        peer: Global rank at the other end of a message.
        batch: Number of the batch of messages that it belongs to.
    """

    name: str
    group: Group
    place: str
    alike: tuple[tuple[str, Any], ...] = ()
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    peer: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        given = ", ".join(f"{name} {value}" for name, value in self.alike)
        other_end = {"send": "to", "recv": "from"}.get(self.name)
        members = f"{other_end} rank {self.peer}" if other_end else f"of ranks {list(self.group.ranks)}"
        return f"{self.name} {members}{f' ({given})' if given else ''} at {self.place}"


@dataclass
class Record:
    """What one rank did, in order.

    Attributes:
        operations: All calls.
        faults: What was refused; also where the code has caught the error.
    """

    operations: list[Operation] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class _Recorder:
    def __init__(self, record: Record, backend: str) -> None:
        self.record = record
        self._backend = backend
        self._groups: dict[str, Group | None] = {}
        self._of_the_host: set[str] = set()
        self._thread: int | None = None
        self._num_batches = 0
        self._batch: int | None = None

    def group_of(self, process_group: ProcessGroup) -> Group | None:
        """Return the group; None for one that would be none of NCCL's."""
        name = process_group.group_name
        if name not in self._groups or self._groups[name] is None:
            backend = distributed_c10d._world.pg_map.get(process_group, ("",))[0]
            counts = backend == self._backend and name not in self._of_the_host
            ranks = tuple(dist.get_process_group_ranks(process_group)) if counts else ()
            self._groups[name] = Group(name, ranks) if counts else None
        return self._groups[name]

    def forget_groups(self) -> None:
        self._groups.clear()
        self._of_the_host.clear()

    def note_new(self, process_group: Any, backend: str | None) -> None:
        if backend is not None and isinstance(process_group, ProcessGroup):
            self._of_the_host.add(process_group.group_name)

    @contextmanager
    def batch(self) -> Iterator[None]:
        self._num_batches, self._batch = self._num_batches + 1, self._num_batches + 1
        try:
            yield
        finally:
            self._batch = None

    def note_of_several(self, reduction: Any) -> None:
        """Note a call collected from several: torch looks at the reduction of the first one alone."""
        for process_group, collected in distributed_c10d._world.pg_coalesce_state.items():
            others = {str(each.redop) for each in collected if each.redop != reduction}
            group = self.group_of(process_group)
            if others and group is not None:
                self._refuse("collectives", group, _place(), f"several reductions in one call: {reduction}, {others}")

    def _refuse(self, name: str, group: Group, place: str, why: str) -> None:
        text = f"NCCL refuses {name} of ranks {list(group.ranks)} at {place}: {why}"
        self.record.faults.append(text)
        raise NcclRuleError(text)

    def note(self, process_group: ProcessGroup, name: str, arguments: Sequence[Any]) -> None:
        group = self.group_of(process_group)
        if group is None:
            return
        self.record.operations.append(self._checked(group, process_group.rank(), name, arguments, _place()))

    def _checked(self, group: Group, rank: int, name: str, arguments: Sequence[Any], place: str) -> Operation:
        refuse = partial(self._refuse, name, group, place)

        if name in _REFUSED:
            refuse(_REFUSED[name])
        self._thread = self._thread or threading.get_ident()  # of the process's first call: Ray's is not its main one
        if threading.get_ident() != self._thread:
            refuse("it comes from a second thread, so that its place among the others is chance")
        tensors = list(_tensors_in(arguments))
        types = {tensor.dtype for tensor in tensors}
        if unknown := types - TYPES:
            refuse(f"it has no {', '.join(map(str, unknown))}")
        if len(types) > 1:
            refuse(f"its tensors are of several types: {', '.join(sorted(map(str, types)))}")
        if any(not tensor.is_contiguous() for tensor in tensors):
            refuse(f"a tensor is not contiguous: {[(list(each.shape), each.stride()) for each in tensors]}")
        alike: list[tuple[str, Any]] = [("type", str(next(iter(types))))] if types else []
        alike += _options(arguments, group, types, refuse)
        if name in _MESSAGES:
            (tensor,), other, tag = arguments
            peer = group.ranks[other]
            if other == rank:
                refuse("a rank cannot send to itself")
            if tag:
                refuse(f"it knows no tags, got {tag}")
            alike.append(("shape", list(tensor.shape)))
            return Operation(name, group, place, tuple(alike), peer=peer, batch=self._batch)
        if name in _EXCHANGES:
            received, sent = _exchanged(name, arguments, len(group.ranks))
            return Operation(name, group, place, tuple(alike), sent, received)
        if name == "set_timeout":
            alike.append(("timeout", str(arguments[0])))
        shapes = [list(tensor.shape) for tensor in _ALIKE[name](*arguments)]
        return Operation(name, group, place, tuple([*alike, ("shapes", shapes)] if shapes else alike))


def _tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors_in(argument)


def _options(
    arguments: Sequence[Any], group: Group, types: set[torch.dtype], refuse: Callable[[str], None]
) -> Iterator[tuple[str, Any]]:
    """Yield the reduction and root, out of the options among the arguments."""
    options = arguments[-1] if arguments else None
    reduction, root = getattr(options, "reduceOp", None), getattr(options, "rootRank", None)
    if reduction is not None:
        name = next((str(each).rpartition(".")[2] for each in _REDUCTIONS if reduction == each), None)
        if name is None:
            refuse(f"it has no such reduction ({reduction})")
        if name == "AVG" and torch.bool in types:
            refuse("it has no mean of truth values")
        if types & _FLOAT8:
            refuse("it carries float8, but adds none up on every card")
        yield "reduction", name
    if root is not None:
        yield "root rank", group.ranks[root]


def _exchanged(name: str, arguments: Sequence[Any], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements that come from each member, and that go to each."""
    if name == "alltoall":
        outputs, inputs, *_ = arguments
        return tuple(each.numel() for each in outputs), tuple(each.numel() for each in inputs)
    output, given, output_splits, input_splits, *_ = arguments
    return _split(output, output_splits, size), _split(given, input_splits, size)


def _split(tensor: torch.Tensor, splits: Sequence[int], size: int) -> tuple[int, ...]:
    row = tensor.numel() // max(tensor.shape[0], 1)
    return tuple(int(rows) * row for rows in splits) if len(splits) else (tensor.numel() // size,) * size


_TORCH = f"{Path(torch.__file__).parent}/"
_ROOT = f"{Path(__file__).resolve().parents[2]}/"
_places: dict[tuple[str, int, str, int], str] = {}


def _place() -> str:
    """Return the first line outside of torch that led here, and the first of this project's own."""
    frame = sys._getframe(1)
    first = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((_TORCH, "<")):
            first = first or frame
            if file.startswith(_ROOT) and "/.venv/" not in file:
                break
        if frame.f_back is None:
            break
        frame = frame.f_back
    outer = first or frame
    key = (outer.f_code.co_filename, outer.f_lineno, frame.f_code.co_filename, frame.f_lineno)
    if key not in _places:
        lines = [f"{_short(key[0])}:{key[1]}", f"{_short(key[2])}:{key[3]}"]
        _places[key] = lines[0] if lines[0] == lines[1] else f"{lines[0]} from {lines[1]}"
    return _places[key]


def _short(file: str) -> str:
    return file.removeprefix(_ROOT).rpartition("site-packages/")[2]


def _noting(recorder: _Recorder, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noted(process_group: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        recorder.note(process_group, name, [*arguments, *named.values()])
        return method(process_group, *arguments, **named)

    return noted


@contextmanager
def recorded(backend: str = "gloo", record: Record | None = None) -> Iterator[Record]:
    """Checks and note all collectives and messages of this process, on groups that would be NCCL's.

    All are but those whose backend was named when they were made: these stay on the host.

    Args:
        backend: Stands in for NCCL.
        record: What it is noted in; None: a new one.

    Raises:
        NcclRuleError: Where such a call is made.
    """
    recorder = _Recorder(record or Record(), backend)
    names = [name for name in (*_ALIKE, *_EXCHANGES, *_MESSAGES, *_REFUSED) if hasattr(ProcessGroup, name)]
    methods = {name: getattr(ProcessGroup, name) for name in names}
    functions = {
        name: getattr(distributed_c10d, name) for name in ("batch_isend_irecv", "new_group", "destroy_process_group")
    }

    @wraps(functions["batch_isend_irecv"])
    def batch_isend_irecv(operations: Any) -> Any:
        with recorder.batch():
            return functions["batch_isend_irecv"](operations)

    @wraps(functions["new_group"])
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *others: Any, **named: Any) -> Any:
        process_group = functions["new_group"](ranks, timeout, backend, *others, **named)
        recorder.note_new(process_group, backend)
        return process_group

    @wraps(functions["destroy_process_group"])
    def destroy_process_group(*arguments: Any) -> None:
        functions["destroy_process_group"](*arguments)
        recorder.forget_groups()

    collected = distributed_c10d._CollOp

    @wraps(collected)
    def of_several(operation: Any, tensor: Any, output: Any = None, reduction: Any = None, root: Any = None) -> Any:
        recorder.note_of_several(reduction)
        return collected(operation, tensor, output, reduction, root)

    functions["_CollOp"] = collected
    replaced = {"batch_isend_irecv": batch_isend_irecv, "new_group": new_group, "_CollOp": of_several}
    replaced["destroy_process_group"] = destroy_process_group
    try:
        for name, method in methods.items():
            setattr(ProcessGroup, name, _noting(recorder, name, method))
        _set(replaced)
        yield recorder.record
    finally:
        for name, method in methods.items():
            setattr(ProcessGroup, name, method)
        _set(functions)


def _set(functions: dict[str, Callable[..., Any]]) -> None:
    for name, function in functions.items():
        for module in (distributed_c10d, dist):
            if hasattr(module, name):
                setattr(module, name, function)


# Ranks that may be killed: each call is in a file before it is made


class _Lines:
    """A list of which each item is appended to a file of this rank of its job."""

    def __init__(self, folder: Path, kind: str):
        self._folder, self._kind = folder, kind

    def append(self, item: Any) -> None:
        name = f"{os.environ['MASTER_PORT']}-{dist.get_rank()}.jsonl"
        with (self._folder / name).open("a") as file:
            file.write(json.dumps([self._kind, item if self._kind == "fault" else astuple(item)]) + "\n")


_for_ever: list[Any] = []


def record_into(folder: Path) -> None:
    """Checks and notes as `recorded` does for as long as this process lives."""
    context = recorded(record=Record(_Lines(folder, "operation"), _Lines(folder, "fault")))  # type: ignore[arg-type]
    context.__enter__()
    _for_ever.append(context)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of the ranks' operations under NCCL: what would be mixed up or hang is found in their notes.

The notes of `nccl_rules` meet as NCCL's kernels would: each rank goes on when all that take part in its current
operation have come to it. With gloo, messages of one rank do not wait for each other.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.nccl_rules import Group, Operation, Record


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

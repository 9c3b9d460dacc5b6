# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What NCCL would refuse, mix up or wait for in vain is found on ranks that talk over gloo, each class of it once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.gloo_ranks import RankError, run_ranks
from tests.support.nccl_rules import NcclRuleError, Record, recorded
from tests.support.quick_list import full
from tests.support.rank_state import problems_of_job

THIS_FILE = Path(__file__).name


@contextmanager
def rank_of(world_size: int, rank: int) -> Iterator[Record]:
    """A rank whose collectives all return at once, with whatever was in their tensors."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with recorded("fake") as record:
            yield record
    finally:
        dist.destroy_process_group()


def problems(*programs: Callable[[], Any]) -> list[str]:
    """Return the problems of a job whose ranks each run one of these."""
    records = []
    for rank, program in enumerate(programs):
        with rank_of(len(programs), rank) as record:
            program()
        records.append(record)
    return problems_of_job(records)


def both_directions(*order: str, peer: int) -> None:
    for name in order:
        getattr(dist, name)(torch.zeros(3), peer)


def batch(*order: str, peer: int) -> None:
    dist.batch_isend_irecv([dist.P2POp(getattr(dist, name), torch.zeros(3), peer) for name in order])


def coalesced(*reduced: dict[str, Any]) -> None:
    with dist._coalescing_manager():
        for each in reduced:
            dist.all_reduce(**each)


def in_a_second_thread() -> None:
    caught: list[NcclRuleError] = []

    def call() -> None:
        try:
            dist.barrier()
        except NcclRuleError as error:
            caught.append(error)

    dist.barrier()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise caught[0]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "int16": (lambda: dist.broadcast(torch.zeros(2, dtype=torch.int16), 0), "no torch.int16"),
    "uint16": (lambda: dist.broadcast(torch.zeros(2, dtype=torch.uint16), 0), "no torch.uint16"),
    "uint32": (lambda: dist.send(torch.zeros(2, dtype=torch.uint32), 1), "no torch.uint32"),
    "float8 summed": (lambda: dist.all_reduce(torch.zeros(2).to(torch.float8_e5m2)), "adds none up"),
    "not contiguous": (lambda: dist.all_reduce(torch.zeros(2, 3).t()), "not contiguous"),
    "not contiguous message": (lambda: dist.send(torch.zeros(2, 3).t(), 1), "not contiguous"),
    "two types": (lambda: dist.all_gather_single(torch.zeros(4), torch.zeros(2, dtype=torch.float64)), "several types"),
    "two types together": (
        lambda: coalesced({"tensor": torch.zeros(2)}, {"tensor": torch.zeros(2).double()}),
        "several types",
    ),
    "bitwise": (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int32), op=ReduceOp.BAND), "no such reduction"),
    "mean of bool": (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.bool), op=ReduceOp.AVG), "truth values"),
    "two reductions together": (
        lambda: coalesced({"tensor": torch.zeros(2)}, {"tensor": torch.zeros(2), "op": ReduceOp.MAX}),
        "several reductions",
    ),
    "to itself": (lambda: dist.distributed_c10d._get_default_group().send([torch.zeros(2)], 0, 0), "to itself"),
    "from anyone": (lambda: dist.recv(torch.zeros(2)), "whoever sends first"),
    "tag": (lambda: dist.send(torch.zeros(2), 1, tag=3), "no tags, got 3"),
    "monitored barrier": (
        lambda: dist.distributed_c10d._get_default_group().monitored_barrier(timedelta(seconds=1), False),
        "gloo alone",
    ),
    "second thread": (in_a_second_thread, "second thread"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nccl_refuses_raises_where_it_is_called(name: str) -> None:
    call, text = REFUSED[name]
    with rank_of(2, 0) as record, pytest.raises(NcclRuleError, match=text) as raised:
        call()
    assert THIS_FILE in str(raised.value)
    # Also where the code under test has caught it.
    assert problems_of_job([record, Record()]) == [f"rank 0: {raised.value}"]


def test_what_it_carries_passes() -> None:
    def program(rank: int) -> None:
        other = 1 - rank
        dist.all_reduce(torch.ones(3, dtype=torch.bool))
        dist.broadcast(torch.zeros(2, dtype=torch.int16).view(torch.uint8), 1)
        dist.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(3))
        dist.all_to_all_single(
            torch.zeros(5, 2), torch.zeros(4 + 2 * rank, 2), [3 - 2 * rank, 2 + 2 * rank], [3 - rank, 1 + 3 * rank]
        )
        dist.all_gather_object([None, None], "anything")
        both_directions("send", "recv", peer=other) if rank == 0 else both_directions("recv", "send", peer=other)
        batch("isend", "irecv", peer=other)
        coalesced({"tensor": torch.zeros(2)}, {"tensor": torch.zeros(3)})
        dist.barrier()

    assert problems(lambda: program(0), lambda: program(1)) == []


def subgroup_then_all(reverse: bool) -> None:
    group = dist.new_group([0, 1])
    for each in (None, group) if reverse else (group, None):
        dist.all_reduce(torch.zeros(2), group=each)


def with_timeout(timeout: timedelta) -> None:
    with suppress(RuntimeError):  # the fake backend has none
        dist.distributed_c10d._get_default_group().set_timeout(timeout)


ORDERS: dict[str, tuple[tuple[Callable[[], Any], Callable[[], Any]], list[str]]] = {
    "one calls nothing": ((lambda: dist.all_reduce(torch.zeros(2)), lambda: None), ["rank 1 has come to its end"]),
    "another collective": (
        (lambda: dist.all_reduce(torch.zeros(2)), lambda: dist.broadcast(torch.zeros(2), 0)),
        ["ranks differ", "rank 0: allreduce", "rank 1: broadcast"],
    ),
    "another shape": (
        (lambda: dist.all_reduce(torch.zeros(2)), lambda: dist.all_reduce(torch.zeros(3))),
        ["shapes [[2]]", "shapes [[3]]"],
    ),
    "another type": (
        (lambda: dist.all_reduce(torch.zeros(2)), lambda: dist.all_reduce(torch.zeros(2).double())),
        ["float32", "float64"],
    ),
    "another root": (
        (lambda: dist.broadcast(torch.zeros(2), 0), lambda: dist.broadcast(torch.zeros(2), 1)),
        ["root rank 0", "root rank 1"],
    ),
    "another reduction": (
        (lambda: dist.all_reduce(torch.zeros(2)), lambda: dist.all_reduce(torch.zeros(2), op=ReduceOp.MAX)),
        ["reduction SUM", "reduction MAX"],
    ),
    "groups in another order": (
        (lambda: subgroup_then_all(False), lambda: subgroup_then_all(True)),
        ["wait for ever", "rank 0: allreduce of ranks [0, 1]", "rank 1: allreduce of ranks [0, 1]"],
    ),
    "splits that do not fit": (
        (
            lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 2], [1, 2]),
            lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 2], [2, 1]),
        ),
        ["rank 0 sends 2 elements to rank 1, which expects 1"],
    ),
    "a shorter message": (
        (lambda: dist.send(torch.zeros(2), 1), lambda: dist.recv(torch.zeros(3), 0)),
        ["ranks differ", "send to rank 1", "recv from rank 0"],
    ),
    "both send first": (
        (lambda: both_directions("send", "recv", peer=1), lambda: both_directions("send", "recv", peer=0)),
        ["wait for ever", "rank 0: send to rank 1", "rank 1: send to rank 0"],
    ),
    "both receive first": (
        (lambda: both_directions("recv", "send", peer=1), lambda: both_directions("recv", "send", peer=0)),
        ["wait for ever", "rank 0: recv from rank 1"],
    ),
    "a barrier less": ((lambda: (dist.barrier(), dist.barrier()), dist.barrier), ["rank 0: barrier"]),
    "another timeout": ((lambda: with_timeout(timedelta(1)), lambda: with_timeout(timedelta(2))), ["1 day", "2 days"]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_ranks_do_differently_is_said_with_its_places(name: str) -> None:
    programs, texts = ORDERS[name]
    (problem,) = problems(*programs)
    for text in [*texts, THIS_FILE]:
        assert text in problem


def test_groups_made_for_the_host_are_left_alone() -> None:
    def program() -> None:
        group = dist.new_group([0, 1], backend="fake")
        dist.broadcast(torch.zeros(2, 2, dtype=torch.int16).t(), 0, group=group)

    assert problems(program, lambda: dist.new_group([0, 1], backend="fake")) == []


def send_first() -> None:
    """Goes well over gloo, where no message waits for the one before it."""
    dist.init_process_group("gloo")
    other = 1 - dist.get_rank()
    for message in [dist.isend(torch.zeros(3), other), dist.irecv(torch.zeros(3), other)]:
        message.wait()


def broadcast_and_hide_the_error() -> None:
    dist.init_process_group("gloo")
    try:
        dist.broadcast(torch.zeros(2, dtype=torch.int16), 0)
    except NcclRuleError:
        dist.barrier()


@pytest.mark.parametrize(
    ("function", "text"),
    [(send_first, "NCCL would wait for ever"), full(broadcast_and_hide_the_error, "no torch.int16")],
)
def test_every_job_of_ranks_is_under_these_rules(function: Callable[[], None], text: str) -> None:
    with pytest.raises(RankError, match=text):
        run_ranks(function, 2)

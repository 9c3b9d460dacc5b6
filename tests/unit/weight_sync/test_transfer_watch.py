# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transfers between real processes whose receivers are watched: one that dies ends it for all, and at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.errors import ReceiverLostError, WeightSyncError
from nemo_rl_moe.weight_sync.transport import TransportSpec, WeightTransport
from nemo_rl_moe.weight_sync.watch import watched
from tests.unit.weight_sync.test_folder_transport import (
    BUCKET_BYTES,
    CONTEXT,
    VERSION,
    failing_receive,
    killed_receive,
    receive,
    run_processes,
    send,
    tensors_of,
)

TOO_LONG_S = 100.0
STALLED_S = 1000.0  # later than the tests' own limit: what ends a transfer here is no stall
"""The transfer's own patience is three times as long."""


class ReceivingProcesses:
    """Receivers in processes of their own, that say at the end what has become of them."""

    def __init__(self, spec: TransportSpec, tasks: list[Callable[[TransportSpec, int], object]]):
        self._outcomes: Any = CONTEXT.Manager().dict()
        self.processes = [
            CONTEXT.Process(target=self._run, args=(task, spec, number)) for number, task in enumerate(tasks)
        ]
        for process in self.processes:
            process.start()

    def _run(self, task: Callable[[TransportSpec, int], object], spec: TransportSpec, number: int) -> None:
        try:
            task(spec, number)
            self._outcomes[number] = "received"
        except Exception as error:
            self._outcomes[number] = str(error)

    def find_lost(self, patience_s: float | None = None) -> str | None:
        lost = [n for n, process in enumerate(self.processes) if process.exitcode not in (None, 0)]
        return f"receiver {lost[0]} died" if lost else None

    def have_ended(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    def wait(self) -> list[str]:
        """Return what each has to say; raise where one was killed."""
        for number, process in enumerate(self.processes):
            process.join(TOO_LONG_S)
            if process.exitcode != 0:
                raise WeightSyncError(f"receiver {number} has ended with {process.exitcode}")
        return [self._outcomes[number] for number in range(len(self.processes))]


class Trainer:
    """Two ranks that send, and what they say."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def send(self, spec: TransportSpec) -> int:
        self.found = run_processes({f"sender {rank}": partial(send, spec, rank) for rank in range(2)}, 250.0)
        problems = [each for each in self.found.values() if isinstance(each, str)]
        if problems:
            raise WeightSyncError(problems[0].removeprefix("WeightSyncError: "))
        return sum(self.found.values())


@contextmanager
def opened(
    parent: Path, send: Callable[[TransportSpec], int], *tasks: Callable[[TransportSpec, int], object]
) -> Iterator[tuple[WeightTransport, ReceivingProcesses]]:
    """A transfer whose receivers have been started; it ends before it would count as stalled, and leaves nothing."""
    with WeightTransport(parent, 2, send, bucket_bytes=BUCKET_BYTES, stall_timeout_s=STALLED_S) as transport:
        yield transport, ReceivingProcesses(transport.open(len(tasks), VERSION), list(tasks))
    assert list(parent.iterdir()) == []


def test_a_transfer_that_nothing_happens_to(tmp_path: Path) -> None:
    with opened(tmp_path, Trainer().send, receive, receive) as (transport, receivers), watched(transport, receivers):
        assert transport.send() == sum(tensor.nbytes for rank in range(2) for _, tensor in tensors_of(rank))
        assert receivers.wait() == ["received"] * 2


def test_a_receiver_that_dies_ends_the_transfer_for_all(tmp_path: Path) -> None:
    trainer = Trainer()
    with opened(tmp_path, trainer.send, receive, killed_receive) as (transport, receivers):
        with pytest.raises(ReceiverLostError, match=r"^receiver 1 died$"), watched(transport, receivers):
            transport.send()
        receivers.processes[0].join(TOO_LONG_S)
        assert receivers._outcomes[0] == "receiver 1 died"
    assert trainer.found == dict.fromkeys(("sender 0", "sender 1"), "WeightSyncError: receiver 1 died")


def dies_when_all_has_come(spec: TransportSpec, receiver: int) -> None:
    receive(spec, receiver)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_receiver_that_dies_after_the_last_bucket_is_lost_too(tmp_path: Path) -> None:
    with (
        opened(tmp_path, Trainer().send, receive, dies_when_all_has_come) as (transport, receivers),
        pytest.raises(ReceiverLostError, match="receiver 1 died"),
        watched(transport, receivers),
    ):
        transport.send()
        receivers.wait()


def test_what_a_receiver_raises_is_no_loss(tmp_path: Path) -> None:
    with opened(tmp_path, Trainer().send, receive, failing_receive) as (transport, receivers):
        with (
            pytest.raises(WeightSyncError, match="receiver 1 raised ValueError: no param") as error,
            watched(transport, receivers),
        ):
            transport.send()
        assert type(error.value) is WeightSyncError


def test_a_trainer_that_dies_is_reported_as_it_is(tmp_path: Path) -> None:
    def die(spec: TransportSpec) -> int:
        raise RuntimeError("rank 1 died")

    with opened(tmp_path, die, receive) as (transport, receivers):
        with pytest.raises(RuntimeError, match=r"^rank 1 died$") as error, watched(transport, receivers):
            transport.send()
        assert type(error.value) is RuntimeError
        assert receivers.wait() == ["the trainer's ranks ended: rank 1 died"]


def test_a_loss_that_is_seen_after_what_it_has_caused(tmp_path: Path) -> None:
    """A connection closes before the death of who held it is known."""

    def closed(spec: TransportSpec) -> int:
        raise WeightSyncError("connection closed by peer")

    def lingers(spec: TransportSpec, receiver: int) -> None:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    with opened(tmp_path, closed, lingers) as (transport, receivers):
        with pytest.raises(ReceiverLostError, match="receiver 0 died") as error, watched(transport, receivers):
            transport.send()
        assert "connection closed" in str(error.value.__cause__)


def dies_at_once(spec: TransportSpec, receiver: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def held_up_send(spec: TransportSpec, rank: int) -> None:
    """Sends nothing before the transfer is over."""

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        deadline = time.monotonic() + TOO_LONG_S
        while not (spec.folder / "failed").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield "late", torch.zeros(3)

    spec.send(tensors(), rank, VERSION)


def test_a_loss_is_seen_while_nobody_waits_for_who_is_lost(tmp_path: Path) -> None:
    """The senders are busy with something else; the other receiver would wait for them."""

    def send(spec: TransportSpec) -> int:
        found = run_processes({f"sender {rank}": partial(held_up_send, spec, rank) for rank in range(2)}, 250.0)
        assert set(found.values()) == {"WeightSyncError: receiver 0 died"}
        raise WeightSyncError("receiver 0 died")

    with (
        opened(tmp_path, send, dies_at_once, receive) as (transport, receivers),
        pytest.raises(ReceiverLostError, match="receiver 0 died"),
        watched(transport, receivers),
    ):
        transport.send()

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ray actors that receive weights, one of which dies or freezes: the transfer ends at once; a second one arrives."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from nemo_rl_moe.errors import ReceiverLostError
from nemo_rl_moe.generation.refit import ActorReceivers, refit
from nemo_rl_moe.weight_sync.transport import NamedTensor, TransportSpec, WeightTransport
from nemo_rl_moe.weight_sync.transport_backends import FileTransport, TransportBackend, make_backend
from nemo_rl_moe.weight_sync.watch import watched

TENSORS = [(f"weight {index}", torch.full((500,), float(index))) for index in range(20)]


class Copy:  # pragma: no cover  (runs in another process)
    """A copy of the weights, which a signal may strike when it has half of them."""

    def __init__(self, number: int, faulty_by: signal.Signals | None):
        self._number, self._faulty_by = number, faulty_by
        self._found: dict[str, float] = {}

    def receive(self, spec: TransportSpec) -> str | None:
        try:
            spec.receive(self._number, self._load)
        except Exception as error:
            return str(error)
        return None

    def _load(self, tensors: Iterator[NamedTensor]) -> None:
        for name, tensor in tensors:
            self._found[name] = float(tensor.mean())
            if len(self._found) == len(TENSORS) // 2 and self._faulty_by is not None:
                os.kill(os.getpid(), self._faulty_by)

    def found(self) -> dict[str, float]:
        return self._found

    def is_there(self) -> bool:
        return True


pytestmark = [pytest.mark.shared_ray, pytest.mark.timeout(200)]

ALL_OF_THEM = {name: float(index) for index, (name, _) in enumerate(TENSORS)}
PATIENCE_S = 4.0


@dataclass
class Engine:
    """Two copies; of each transfer's, as it is reported, the second one is hit.

    Attributes:
        strikes: One for each transfer.
    """

    strikes: list[signal.Signals | None]
    copies: list[Any] = field(default_factory=list)

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        strike = self.strikes.pop(0)
        actor = ray.remote(concurrency_groups={"beside": 1})(Copy).options(num_cpus=0)
        self.copies = [actor.remote(number, strike if number else None) for number in range(2)]
        ray.get([copy.is_there.remote() for copy in self.copies])
        by_name = {f"copy {number}": copy for number, copy in enumerate(self.copies)}
        spec = transport.open(2, version)
        receivers = ActorReceivers(
            {copy.receive.remote(spec): name for name, copy in by_name.items()},
            ask=lambda name: by_name[name].is_there.options(concurrency_group="beside").remote(),
            end=lambda name: ray.kill(by_name[name]),
            patience_s=PATIENCE_S,
        )
        with watched(transport, receivers):
            transport.send()
            receivers.wait()


@dataclass(frozen=True)
class Policy:
    """Weights in this process."""

    folder: Path
    make_backend: Callable[[int, str], TransportBackend]
    weight_version: int = 3

    def weight_transport(
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = lambda: None
    ) -> WeightTransport:
        def send(spec: TransportSpec) -> int:
            then()
            return spec.send(TENSORS, 0, self.weight_version)

        return WeightTransport(self.folder, 1, send, bucket_bytes=4000, make_backend=self.make_backend)


def gloo(num_receivers: int, receivers: str) -> TransportBackend:
    return make_backend("gloo", os.urandom(4).hex(), num_receivers, "127.0.0.1")


WAYS = {"files": lambda num_receivers, receivers: FileTransport(), "gloo": gloo}


@pytest.mark.full
@pytest.mark.parametrize("way", [pytest.param("files", marks=pytest.mark.slow), "gloo"])
@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_what_is_lost_gets_the_weights_once_more(way: str, strike: signal.Signals, tmp_path: Path) -> None:
    engine = Engine([strike, None])
    num_bytes = refit(engine, Policy(tmp_path, WAYS[way]))
    assert num_bytes == sum(tensor.nbytes for _, tensor in TENSORS)
    assert ray.get([copy.found.remote() for copy in engine.copies]) == [ALL_OF_THEM] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_what_is_lost_twice_ends_the_run(tmp_path: Path) -> None:
    engine = Engine([signal.SIGKILL, signal.SIGKILL, None])
    with pytest.raises(ReceiverLostError, match=r"^copy 1 died while it received weights$"):
        refit(engine, Policy(tmp_path, WAYS["files"]))
    assert len(engine.strikes) == 1, "no third time"
    assert list(tmp_path.iterdir()) == []

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A trainer that sends weights over NCCL or CUDA IPC to an engine on another card or on its own, which may die.

Rank 0 of the job is the trainer with the driver of the transfer; each other rank is an engine.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.errors import ReceiverLostError
from nemo_rl_moe.weight_sync.transport import TransportSpec, WeightTransport
from nemo_rl_moe.weight_sync.transport_backends import CollectiveTransport, TransportBackend
from nemo_rl_moe.weight_sync.watch import watched

VERSION = 3
PATIENCE_S = 30.0
"""Of NCCL and of the transfer: nothing here may have to wait so long."""
_BUCKET_BYTES = 4096
_NUM_TENSORS = 12


def _nccl(num_receivers: int, group: str) -> TransportBackend:
    return CollectiveTransport("nccl", group, num_receivers, PATIENCE_S, "127.0.0.1")


def _name(engine: int) -> str:
    return f"engine {engine}"


def weights(scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, of which each fills a bucket."""
    for number in range(_NUM_TENSORS):
        yield f"layer {number}", scale * torch.arange(1024, dtype=torch.float32, device="cuda") + number


class _Process:
    """An engine that the driver watches by its number."""

    def __init__(self, pid: int):
        self._stat = Path(f"/proc/{pid}/stat")

    def find_lost(self, patience_s: float | None = None) -> str | None:
        try:
            state = self._stat.read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        return "the engine died" if state in "ZX" else None

    def have_ended(self) -> bool:
        return self.find_lost() is not None


def _note(path: Path, value: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(value), encoding="utf-8")
    path.with_suffix(".new").rename(path)


def _noted(path: Path) -> Any:
    until = time.monotonic() + 10 * PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.01)
    return json.loads(path.read_text(encoding="utf-8"))


def lose_an_engine(folder: str, dies: str) -> None:
    """Run on three ranks: the first engine dies, and the second gets the weights. The trainer notes what it saw.

    Args:
        dies: `connected`: after it has taken a bucket; `unconnected`: before it has met the trainer.
    """
    rank, place = int(os.environ["RANK"]), Path(folder)
    torch.cuda.set_device(rank)
    if rank:
        _note(place / f"pid{rank}", os.getpid())
        folder_of_transfer = Path(_noted(place / f"folder{rank}"))
        spec = TransportSpec(folder_of_transfer, VERSION, 1, 1, _BUCKET_BYTES, backend=_nccl(1, _name(rank)))
        _receive(spec, dies if rank == 1 else "", place)
        return
    found = [_transfer(place, engine) for engine in (1, 2)]
    on_card = (torch.ones(4, device="cuda") * 2).sum().item()  # the trainer's own stream does not hang
    _note(place / "trainer", [*found, on_card])


def _transfer(place: Path, engine: int) -> str:
    """Return the bytes that an engine has got, or what has become of it."""

    def send(spec: TransportSpec) -> int:
        return spec.send(weights(engine), 0, VERSION)

    with WeightTransport(place, 1, send, bucket_bytes=_BUCKET_BYTES, make_backend=_nccl) as transport:
        receivers = _Process(_noted(place / f"pid{engine}"))
        _note(place / f"folder{engine}", str(transport.open(1, VERSION, _name(engine)).folder))
        try:
            with watched(transport, receivers):
                num_bytes = transport.send()
                _noted(place / "engine")  # until then it reads the notes of the transfer
                return str(num_bytes)
        except ReceiverLostError as error:
            return str(error)


def _receive(spec: TransportSpec, dies: str, place: Path) -> None:
    if dies == "unconnected":
        os.kill(os.getpid(), signal.SIGKILL)
    received = {}

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            assert tensor.is_cuda
            received[name] = tensor.tolist()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

    spec.receive(0, load)
    _note(place / "engine", received)

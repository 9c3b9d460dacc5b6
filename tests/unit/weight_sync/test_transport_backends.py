# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ways of buckets beside files: real gloo groups between processes, and handles of memory that several can open."""

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.weight_sync import manifest
from nemo_rl_moe.weight_sync import transport_backends as backends
from nemo_rl_moe.weight_sync.board import FolderBoard, NetworkBoard, serve_store
from nemo_rl_moe.weight_sync.bucket import BucketLabel, tensor_checksum, weighted_sum
from nemo_rl_moe.weight_sync.manifest import read_manifest
from nemo_rl_moe.weight_sync.packing import Packing, packed
from nemo_rl_moe.weight_sync.transport import NamedTensor, TransportSpec, WeightTransport
from nemo_rl_moe.weight_sync.transport_backends import (
    CollectiveTransport,
    IpcTransport,
    TransportBackend,
)
from tests.support.gpu_stand_ins import PLACE, HostMemory
from tests.support.quick_list import slow
from tests.unit.weight_sync.test_folder_transport import (
    BUCKET_BYTES,
    VERSION,
    bits_of,
    receive,
    run_processes,
    send,
    tensors_of,
)


def gloo(num_receivers: int, receivers: str = "", timeout_s: float = 200.0) -> CollectiveTransport:
    return CollectiveTransport("gloo", f"group {receivers}", num_receivers, timeout_s, address="127.0.0.1")


def ipc(num_receivers: int, receivers: str = "") -> IpcTransport:
    return IpcTransport(HostMemory())


def ipc_of_several_gpus(num_receivers: int, receivers: str = "") -> IpcTransport:
    return IpcTransport(HostMemory(is_everywhere=False))


@pytest.fixture(autouse=True)
def no_shared_memory_stays() -> Iterator[None]:
    before = set(Path("/dev/shm").glob("psm_*"))
    yield
    for path in set(Path("/dev/shm").glob("psm_*")) - before:
        path.unlink()


def transfers(
    parent: Path,
    make_backend: Callable[[int, str], TransportBackend],
    sender: Callable[..., Any] = send,
    receiver: Callable[..., Any] = receive,
    count: int = 1,
    address: str | None = None,
) -> dict[str, Any]:
    """Transfers from three senders to two receivers, in the same processes; results of each by its name."""
    with_transport = [
        WeightTransport(
            parent, 3, lambda spec: 0, bucket_bytes=BUCKET_BYTES, make_backend=make_backend, address=address
        )
        for _ in range(count)
    ]
    for transport in with_transport:
        transport.__enter__()
    try:
        opened = [transport.open(2, VERSION) for transport in with_transport]
        specs = [pickle.loads(pickle.dumps(spec)) for spec in opened]  # noqa: S301  (its own)
        tasks = {f"sender {rank}": partial(_each, sender, specs, rank) for rank in range(3)}
        tasks |= {f"receiver {rank}": partial(_each, receiver, specs, rank) for rank in range(2)}
        return run_processes(tasks, timeout_s=250.0)
    finally:
        for transport in with_transport:
            transport.__exit__(None, None, None)


def _each(function: Callable[..., Any], specs: list[TransportSpec], rank: int) -> list[Any]:
    return [function(spec, rank) for spec in specs]


@pytest.mark.parametrize(
    ("make_backend", "address"),
    [(gloo, None), (ipc, None), (gloo, "127.0.0.1"), pytest.param(ipc, "127.0.0.1", marks=pytest.mark.full)],
    ids=["gloo", "ipc", "gloo between machines", "ipc on several machines"],
)
def test_every_receiver_gets_the_bits_of_every_sender_again_and_again(
    make_backend: Callable[[int, str], TransportBackend], address: str | None, tmp_path: Path
) -> None:
    found = transfers(tmp_path, make_backend, count=2, address=address)
    expected = {name: bits_of(tensor) for sender in range(3) for name, tensor in tensors_of(sender)}
    for receiver in range(2):
        assert found[f"receiver {receiver}"] == [expected, expected]
    for sender in range(3):
        assert found[f"sender {sender}"] == 2 * [sum(tensor.nbytes for _, tensor in tensors_of(sender))]
    assert list(tmp_path.iterdir()) == []


def placed_send(spec: TransportSpec, rank: int) -> int:
    PLACE[0] = f"GPU-{rank}"
    return send(spec, rank)


def placed_receive(spec: TransportSpec, rank: int) -> Any:
    PLACE[0] = ("GPU-1", "GPU-0")[rank]
    return receive(spec, rank)


def test_engines_take_what_the_trainer_has_on_their_own_gpu(tmp_path: Path) -> None:
    found = transfers(tmp_path, ipc_of_several_gpus, placed_send, placed_receive)
    for receiver, sender in ((0, 1), (1, 0)):
        expected = {name: bits_of(tensor) for name, tensor in tensors_of(sender)}
        assert expected
        assert found[f"receiver {receiver}"] == [expected]
        assert found[f"sender {sender}"] == [sum(tensor.nbytes for _, tensor in tensors_of(sender))]
    assert found["sender 2"] == [0], "nobody is on its GPU"


def lost_receive(spec: TransportSpec, rank: int) -> Any:
    PLACE[0] = ("GPU-1", "GPU-7")[rank]
    return receive(spec, rank)


@pytest.mark.full
def test_an_engine_on_a_gpu_without_the_trainer_is_reported(tmp_path: Path) -> None:
    found = transfers(tmp_path, ipc_of_several_gpus, placed_send, lost_receive)
    assert "no rank of the trainer is on its device, GPU-7; policy.generation.weight_transport" in found["receiver 1"]
    assert found["receiver 0"].startswith("WeightSyncError: ")


def connections(spec: TransportSpec, rank: int) -> int:
    receive(spec, rank)
    return len(backends._groups)


def test_connections_are_kept_as_long_as_the_same_receive(tmp_path: Path) -> None:
    found = transfers(tmp_path, gloo, receiver=connections, count=3)
    # The third sender has no tensors, and needs none.
    assert found["receiver 0"] == found["receiver 1"] == [2, 2, 2]


def lock_step_send(spec: TransportSpec, rank: int) -> int:
    """Sends tensors that all ranks bring together one after the other, as they do with parameters that are cut."""

    def tensors() -> Iterator[NamedTensor]:
        for index in range(12):
            (spec.folder / f"brought-{rank}-{index}").touch()
            while not all((spec.folder / f"brought-{other}-{index}").exists() for other in range(3)):
                pass
            # Each in turn has one, which is a bucket of its own.
            if index % 3 == rank:
                yield f"{index}", torch.full((BUCKET_BYTES // 4,), float(index))

    return spec.send(tensors(), rank, VERSION)


def slow_or_quick_receive(spec: TransportSpec, rank: int) -> list[str]:
    """Looks at the folder early or late, so that receivers see different buckets first."""
    names: list[str] = []

    def load(tensors: Iterator[NamedTensor]) -> None:
        for name, tensor in tensors:
            assert (tensor == float(name)).all()
            names.append(name)

    spec.receive(rank, load)
    return names


@pytest.mark.full
def test_senders_that_wait_for_each_other_do_not_wait_for_ever(tmp_path: Path) -> None:
    found = transfers(tmp_path, gloo, lock_step_send, slow_or_quick_receive)
    assert sorted(found["receiver 0"][0], key=int) == [str(index) for index in range(12)]
    assert found["receiver 0"] == found["receiver 1"], "one order for all"


def dying_send(spec: TransportSpec, rank: int) -> int:
    def tensors() -> Iterator[NamedTensor]:
        yield from tensors_of(rank)
        if rank == 1:
            os.kill(os.getpid(), 9)

    return spec.send(tensors(), rank, VERSION)


def dying_receive(spec: TransportSpec, rank: int) -> None:
    def load(tensors: Iterator[NamedTensor]) -> None:
        for index, _ in enumerate(tensors):
            if index == 20 and rank == 1:
                os.kill(os.getpid(), 9)

    spec.receive(rank, load)


@pytest.mark.parametrize(
    ("functions", "dead", "others"),
    [
        # A sender whose tensors have all been taken needs the others no more.
        pytest.param((dying_send, receive), "sender 1", ("receiver 0", "receiver 1"), marks=pytest.mark.full),
        ((send, dying_receive), "receiver 1", ("receiver 0", "sender 0", "sender 1")),
    ],
)
def test_a_process_that_dies_ends_the_transfer(
    functions: tuple[Any, Any], dead: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    def quick(spec: Any, rank: int, function: Any) -> Any:
        return function(replace(spec, stall_timeout_s=5.0), rank)

    found = transfers(tmp_path, partial(gloo, timeout_s=10.0), *(partial(quick, function=each) for each in functions))
    assert found.pop(dead) is None
    for name in others:
        assert str(found[name]).startswith("WeightSyncError: "), found


def spoiled_send(spec: TransportSpec, rank: int) -> int:
    """Sends what it has not reported."""
    original = manifest.buffer_checksum

    def spoiled(packing: Packing, buffer: Tensor) -> str:
        changed = buffer.clone()
        changed[0] ^= 64
        return original(packing, changed)

    manifest.buffer_checksum = spoiled  # of this process alone
    return send(spec, rank)


# Senders wait for the receivers' next step until their time is over.
@pytest.mark.parametrize("make_backend", [slow(partial(gloo, timeout_s=5.0)), ipc], ids=["gloo", "ipc"])
def test_bytes_that_change_on_the_way_are_reported(
    make_backend: Callable[[int, str], TransportBackend], tmp_path: Path
) -> None:
    found = transfers(tmp_path, make_backend, spoiled_send)
    reported = found["receiver 0"]
    assert "is damaged" in reported or "WeightSyncError: receiver 1: " in reported, reported


def test_a_bucket_in_the_place_of_another_is_reported(tmp_path: Path) -> None:
    label, board = BucketLabel("transfer", VERSION, 0, 3), FolderBoard(tmp_path)
    gloo(0).publish(board, "bucket", label, {"weight": torch.arange(5.0)})
    text = board.read("bucket")
    assert read_manifest("bucket", text, label).packing.rows == [["weight", "float32", [5]]]
    with pytest.raises(WeightSyncError, match=r"bucket is bucket 3 of sender 0, version 7.*; expected bucket 4"):
        read_manifest("bucket", text, replace(label, number=4))
    with pytest.raises(WeightSyncError, match="bucket cannot be read"):
        read_manifest("bucket", "{", label)


def test_tensors_are_packed_where_their_types_may_lie() -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.arange(2.0, dtype=torch.float64),
        "c": torch.ones(()),
        "transposed": torch.arange(6.0).view(2, 3).T,
    }
    buffer = packed(list(tensors.values()), torch.device("cpu"))
    assert buffer.tolist()[:3] == [0, 1, 2]
    assert len(buffer) == 16 + 16 + 16 + 32
    packing = Packing.of(tensors)
    assert packing.rows == [
        ("a", "uint8", [3]),
        ("b", "float64", [2]),
        ("c", "float32", []),
        ("transposed", "float32", [3, 2]),
    ]
    assert packing.num_bytes == len(buffer)
    for name, tensor in packing.cut(buffer).items():
        assert bits_of(tensor) == bits_of(tensors[name])


def test_the_checksum_of_devices_sees_each_word_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_moe.weight_sync.bucket._WORDS_AT_A_TIME", 7)
    content = torch.randint(0, 256, (4 * 50 + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    words = [int.from_bytes(bytes(content[4 * n : 4 * n + 4].tolist()), "little", signed=True) for n in range(50)]
    words += content[200:].tolist()
    expected = sum(word * (2 * place + 1) for place, word in enumerate(words))
    assert weighted_sum(content) == (expected + 2**63) % 2**64 - 2**63
    for index in range(len(content)):
        changed = content.clone()
        changed[index] ^= 1 << index % 8
        assert weighted_sum(changed) != weighted_sum(content)
    swapped = content.clone()
    swapped[:4], swapped[4:8] = content[4:8], content[:4]
    assert weighted_sum(swapped) != weighted_sum(content)
    assert tensor_checksum("a", content) != tensor_checksum("b", content)


@pytest.mark.parametrize("is_folder", [True, False])
def test_notes_of_a_board(is_folder: bool, tmp_path: Path) -> None:
    store = None if is_folder else serve_store("127.0.0.1")
    board = FolderBoard(tmp_path) if store is None else NetworkBoard("127.0.0.1", store.port)
    board.put("a", "1")
    board.put("a", "2")
    assert [board.put_first("b", text) for text in ("first", "second")] == [True, False]
    assert (board.names(), board.read("a"), board.read("b")) == ({"a", "b"}, "2", "first")
    board.remove(["a", "c"])
    assert board.names() == {"b"}
    assert board.own_address() == "127.0.0.1"


def test_a_board_that_is_gone_has_ended_the_transfer(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="the folder of the transfer cannot be read"):
        FolderBoard(tmp_path / "gone").names()
    store = serve_store("127.0.0.1")
    board = NetworkBoard("127.0.0.1", store.port)
    board.put("a", "1")
    del store
    with pytest.raises(WeightSyncError, match=r"the notes of the transfer at 127.0.0.1:\d+ cannot be read"):
        board.names()

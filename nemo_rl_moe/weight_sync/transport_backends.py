# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transports of a bucket's bytes from a trainer rank to engine workers: files, collectives (NCCL, gloo), CUDA IPC.

The transfer's board lists the buckets and the receivers that have taken them. Files are in its folder. Collectives
serve engines on separate GPUs, and read each bucket once for any number of receivers. CUDA IPC serves engines on the
trainer's GPUs, where NCCL does not work: each engine rank reads the memory of the trainer's rank on its own GPU only,
because reading from others would need a CUDA context of each process on each GPU.

With NCCL and CUDA IPC tensors stay on the device.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.weight_sync.board import Board, FolderBoard, serve_store
from nemo_rl_moe.weight_sync.bucket import BucketLabel, opened_bucket, write_bucket
from nemo_rl_moe.weight_sync.manifest import manifest_text, read_manifest
from nemo_rl_moe.weight_sync.nccl_group import make_nccl_group, wait_for
from nemo_rl_moe.weight_sync.packing import Packing, packed

COLLECTIVE_TIMEOUT_S = 120.0
_POLL_S = 0.01
BUCKET_BYTES = 64 * 2**20
DEVICE_BUCKET_BYTES = 512 * 2**20
"""Size of buckets on devices. Larger ones need more GPU memory, smaller ones more waits of the host."""


class TransportBackend(Protocol):
    """A transport, pickled to senders and receivers."""

    @property
    def is_ordered(self) -> bool:
        """Whether all receivers must take the buckets of all senders in one global order."""
        ...

    @property
    def on_device(self) -> bool:
        """Whether tensors are sent from the trainer's device instead of host memory.

        If so, every trainer rank has all tensors on its device.
        """
        ...

    @property
    def bucket_bytes(self) -> int: ...

    def place(self) -> str | None:
        """Identify the device of this process if only processes on one device exchange tensors, else return None."""
        ...

    def publish(self, board: Board, name: str, label: BucketLabel, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Announce a bucket. The returned buffer must live until every receiver has taken the bucket."""
        ...

    def deliver(self, board: Board, label: BucketLabel, buffer: Tensor | None) -> None:
        """Send the buffer that `publish` returned. Called after the announcement is visible to receivers."""
        ...

    def opened(
        self, board: Board, name: str, label: BucketLabel, receiver: int
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """Verify the bucket, and yield its tensors. They are valid inside the context."""
        ...


@dataclass(frozen=True)
class FileTransport:
    is_ordered: bool = field(default=False, init=False)
    on_device: bool = field(default=False, init=False)
    bucket_bytes: int = field(default=BUCKET_BYTES, init=False)

    def place(self) -> str | None:
        return None

    def publish(self, board: Board, name: str, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
        storages: set[int] = set()
        content: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            storage = tensor.untyped_storage().data_ptr()
            # safetensors refuses shared memory, which tied weights and slices of one tensor have.
            content[key] = tensor.clone() if storage in storages else tensor.contiguous()
            storages.add(storage)
        _folder_of(board).put_file(name, lambda path: write_bucket(path, label, content))

    def deliver(self, board: Board, label: BucketLabel, buffer: Tensor | None) -> None:
        """Do nothing: the file contains the bytes."""

    def opened(
        self, board: Board, name: str, label: BucketLabel, receiver: int
    ) -> AbstractContextManager[dict[str, Tensor]]:
        return opened_bucket(_folder_of(board).folder / name, label)


def _folder_of(board: Board) -> FolderBoard:
    assert isinstance(board, FolderBoard)  # transfers through files have one
    return board


class _Connections(NamedTuple):
    group: Any
    store: TCPStore


# Connections are reused: making them takes seconds with NCCL.
_groups: dict[tuple[str, int], _Connections] = {}


@dataclass(frozen=True)
class CollectiveTransport:
    """Broadcasts from each sender to all receivers, in one process group per sender.

    Receivers take the buckets in the global order in which they became ready. In another order, two
    receivers could wait in broadcasts of different senders. This would be a deadlock, because senders wait for each
    other in the trainer's collectives while they gather tensors.

    Attributes:
        group: Name of the connections. Other processes, or a failed transfer, require a new name.
        address: Address of gloo's network interface, such as loopback on one machine; None: the host name's address.
    """

    backend: Literal["nccl", "gloo"]
    group: str
    num_receivers: int
    timeout_s: float
    address: str | None = None
    is_ordered: bool = field(default=True, init=False)

    @property
    def on_device(self) -> bool:
        return self.backend == "nccl"

    @property
    def bucket_bytes(self) -> int:
        return DEVICE_BUCKET_BYTES if self.on_device else BUCKET_BYTES

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda") if self.on_device else torch.device("cpu")

    def place(self) -> str | None:
        return None

    def publish(self, board: Board, name: str, label: BucketLabel, tensors: Mapping[str, Tensor]) -> Tensor:
        buffer = packed(list(tensors.values()), self._device)
        board.put(name, manifest_text(label, Packing.of(tensors), buffer))
        return buffer

    def deliver(self, board: Board, label: BucketLabel, buffer: Tensor | None) -> None:
        assert buffer is not None  # it comes from `publish`
        self._broadcast(board, label, 0, buffer)

    @contextmanager
    def opened(self, board: Board, name: str, label: BucketLabel, receiver: int) -> Iterator[dict[str, Tensor]]:
        manifest = read_manifest(name, board.read(name), label)
        buffer = torch.empty(manifest.packing.num_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast(board, label, 1 + receiver, buffer)
        yield manifest.opened(name, label, buffer)

    def _broadcast(self, board: Board, label: BucketLabel, rank: int, buffer: Tensor) -> None:
        key = self.group, label.sender
        try:
            if key not in _groups:
                _groups[key] = self._connect(board, label.sender, rank)
            options = BroadcastOptions()
            options.rootRank = 0
            group = _groups[key].group
            work = group.broadcast([buffer], options)
            if not self.on_device:
                work.wait()
                return
            wait_for(work, group, board, self.timeout_s)
            torch.cuda.synchronize(buffer.device)  # the board then reports the bucket as taken
        except WeightSyncError:
            _groups.pop(key, None)
            raise
        except (RuntimeError, ValueError) as error:
            _groups.pop(key, None)
            raise WeightSyncError(f"{self.backend}, {label}: {' '.join(str(error).split())[:300]}") from error

    def _connect(self, board: Board, sender: int, rank: int) -> _Connections:
        store = self._meeting_place(board, f"{sender:04d}.store", serves=rank == 0)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return _Connections(self._group(board, store, rank), store)

    def _meeting_place(self, board: Board, name: str, *, serves: bool) -> TCPStore:
        """Return a store by which the group's processes find each other. It outlives the board of the transfer."""
        if serves:
            address = self.address or board.own_address()
            store = serve_store(address, 1 + self.num_receivers)
            board.put(name, json.dumps([address, store.port]))
            return store
        deadline = time.monotonic() + self.timeout_s
        while name not in board.names():
            if time.monotonic() > deadline:
                raise WeightSyncError(f"waited for {self.timeout_s:g} s for the sender's {name}")
            time.sleep(_POLL_S)
        address, port = json.loads(board.read(name))
        return TCPStore(address, port, 1 + self.num_receivers, is_master=False)

    def _group(self, board: Board, store: TCPStore, rank: int) -> Any:
        size = 1 + self.num_receivers
        if self.on_device:
            return make_nccl_group(board, store, rank, size, self.timeout_s)
        device = (
            ProcessGroupGloo.create_device(hostname=self.address)
            if self.address is not None
            else ProcessGroupGloo.create_default_device()
        )
        gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        gloo._devices, gloo._threads, gloo._timeout = [device], 2, timedelta(seconds=self.timeout_s)
        return ProcessGroupGloo(store, rank, size, gloo)


class SharedMemory(Protocol):
    def shared(self, buffer: Tensor) -> Mapping[str, Any]:
        """Return a JSON-serializable handle of a buffer, valid while the buffer lives."""
        ...

    def mapped(self, handle: Mapping[str, Any]) -> AbstractContextManager[Tensor]: ...

    def device(self) -> torch.device: ...

    def place(self) -> str:
        """Return the name of the device, which is the same in all processes."""
        ...


class CudaMemory:
    """GPU memory, shared by CUDA IPC handles."""

    def device(self) -> torch.device:
        return torch.device("cuda")

    def place(self) -> str:
        return str(torch.cuda.get_device_properties(self.device()).uuid)

    def shared(self, buffer: Tensor) -> Mapping[str, Any]:
        torch.cuda.synchronize(buffer.device)
        _, *handle = buffer.untyped_storage()._share_cuda_()
        return {
            "handle": [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in handle],
            "bytes_at": [index for index, value in enumerate(handle) if isinstance(value, bytes)],
        }

    @contextmanager
    def mapped(self, handle: Mapping[str, Any]) -> Iterator[Tensor]:
        values = [
            base64.b64decode(value) if index in handle["bytes_at"] else value
            for index, value in enumerate(handle["handle"])
        ]
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *values)
        yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.cuda.synchronize()  # the loader's copies must finish before the sender may free the memory


@dataclass(frozen=True)
class IpcTransport:
    """Buckets in GPU memory. A receiver reads them from the memory of the sender on its own GPU."""

    memory: SharedMemory = field(default_factory=CudaMemory)
    is_ordered: bool = field(default=False, init=False)
    on_device: bool = field(default=True, init=False)
    bucket_bytes: int = field(default=DEVICE_BUCKET_BYTES, init=False)

    def place(self) -> str | None:
        return self.memory.place()

    def publish(self, board: Board, name: str, label: BucketLabel, tensors: Mapping[str, Tensor]) -> Tensor:
        buffer = packed(list(tensors.values()), self.memory.device())
        board.put(name, manifest_text(label, Packing.of(tensors), buffer, self.memory.shared(buffer)))
        return buffer

    def deliver(self, board: Board, label: BucketLabel, buffer: Tensor | None) -> None:
        """Do nothing: receivers open the sender's memory."""

    @contextmanager
    def opened(self, board: Board, name: str, label: BucketLabel, receiver: int) -> Iterator[dict[str, Tensor]]:
        manifest = read_manifest(name, board.read(name), label)
        with self.memory.mapped(manifest.handle) as buffer:
            yield manifest.opened(name, label, buffer[: manifest.packing.num_bytes])


TransportBackendFactory = Callable[[int, str], TransportBackend]


def make_backend(way: str, group: str, num_receivers: int, address: str | None) -> TransportBackend:
    """Return the transport that `policy.generation.weight_transport` names."""
    if way == "cuda_ipc":
        return IpcTransport()
    if way in ("gloo", "nccl"):
        backend: Literal["gloo", "nccl"] = "gloo" if way == "gloo" else "nccl"
        return CollectiveTransport(backend, group, num_receivers, COLLECTIVE_TIMEOUT_S, address)
    return FileTransport()

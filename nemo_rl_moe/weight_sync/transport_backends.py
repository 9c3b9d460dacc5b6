# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Transports of a bucket's bytes from a trainer rank to engine workers: files, collectives (NCCL, gloo), CUDA IPC.

A transfer's folder lists and labels the buckets and records who has taken them; the bytes travel in the bucket's file
or beside it. A collective serves engines on GPUs of their own, and reads each bucket once for any number of receivers.
CUDA IPC serves engines on the trainer's GPUs, between which NCCL cannot connect, and copies nothing.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, FileStore, ProcessGroupGloo

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.weight_sync.bucket import BucketLabel, compare, opened_bucket, tensor_checksum, write_bucket

_ALIGNMENT = 16
COLLECTIVE_TIMEOUT_S = 120.0


class TransportBackend(Protocol):
    """A transport, in a form that is pickled to senders and receivers."""

    @property
    def is_ordered(self) -> bool:
        """Whether all receivers must take the buckets of all senders in one order."""
        ...

    def taken_from(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the model where this transport needs it, contiguous."""
        ...

    def write(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> object:
        """Write a bucket's file. The result must live until every receiver has taken the bucket."""
        ...

    def deliver(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
        """Send what is not in the file; called when receivers may have seen the file."""
        ...

    def opened(self, path: Path, label: BucketLabel, receiver: int) -> AbstractContextManager[dict[str, Tensor]]:
        """Open the bucket's tensors, compared with their checksums; valid until it is closed."""
        ...


@dataclass(frozen=True)
class FileTransport:
    is_ordered: bool = field(default=False, init=False)

    def taken_from(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().contiguous()

    def write(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
        write_bucket(path, label, tensors)

    def deliver(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the file has the bytes."""

    def opened(self, path: Path, label: BucketLabel, receiver: int) -> AbstractContextManager[dict[str, Tensor]]:
        """Map the file into memory."""
        return opened_bucket(path, label)


# Connections are kept: making those of NCCL takes seconds.
_groups: dict[tuple[str, int], Any] = {}


@dataclass(frozen=True)
class CollectiveTransport:
    """Broadcasts from each sender to all receivers, in one process group for each sender.

    Senders wait for each other in the trainer's collectives while they gather tensors, so receivers take buckets in the
    one order in which they became ready; two that waited in broadcasts of different senders would deadlock.

    Attributes:
        group: Name of the connections; a new one for other processes or after a failed transfer.
        address: Address whose interface gloo takes, such as loopback on one machine; None: of the host's name.
    """

    backend: Literal["nccl", "gloo"]
    group: str
    num_receivers: int
    timeout_s: float
    address: str | None = None
    is_ordered: bool = field(default=True, init=False)

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")

    def taken_from(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the group's device."""
        return tensor.detach().to(self._device).contiguous()

    def write(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
        """Write names, types, shapes and checksums."""
        write_manifest(path, label, tensors)

    def deliver(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
        buffer = packed(list(tensors.values()), self._device)
        self._broadcast(path, label, 0, buffer)

    @contextmanager
    def opened(self, path: Path, label: BucketLabel, receiver: int) -> Iterator[dict[str, Tensor]]:
        """Receive the broadcast's tensors in new memory."""
        manifest = read_manifest(path, label)
        buffer = torch.empty(manifest.num_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast(path, label, 1 + receiver, buffer)
        tensors = manifest.cut(buffer)
        compare(path.name, label, tensors, manifest.checksums)
        yield tensors

    def _broadcast(self, path: Path, label: BucketLabel, rank: int, buffer: Tensor) -> None:
        key = self.group, label.sender
        try:
            if key not in _groups:
                _groups[key] = self._connect(path.parent / f"store-{label.sender:04d}", rank)
            options = BroadcastOptions()
            options.rootRank = 0
            _groups[key].broadcast([buffer], options).wait()
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)  # the folder reports others that the bucket has been taken
        except (RuntimeError, ValueError) as error:
            _groups.pop(key, None)
            raise WeightSyncError(f"{self.backend}, {label}: {' '.join(str(error).split())[:300]}") from error

    def _connect(self, store_file: Path, rank: int) -> Any:
        size, timeout = 1 + self.num_receivers, timedelta(seconds=self.timeout_s)
        store = FileStore(str(store_file), size)
        store.set_timeout(timeout)
        if self.backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            return ProcessGroupNCCL(store, rank, size, options)
        device = (
            ProcessGroupGloo.create_device(hostname=self.address)
            if self.address is not None
            else ProcessGroupGloo.create_default_device()
        )
        gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        gloo._devices, gloo._threads, gloo._timeout = [device], 2, timeout
        return ProcessGroupGloo(store, rank, size, gloo)


class SharedMemory(Protocol):
    def shared(self, buffer: Tensor) -> Mapping[str, Any]:
        """Return the handle of a buffer, in values that JSON has; valid while the buffer lives."""
        ...

    def mapped(self, handle: Mapping[str, Any]) -> AbstractContextManager[Tensor]: ...

    def device(self) -> torch.device: ...


class CudaMemory:
    """Memory of GPUs, by CUDA's handles for other processes of the same machine."""

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def shared(self, buffer: Tensor) -> Mapping[str, Any]:
        """Return torch's handle of the buffer's storage with the GPU's name: processes may number GPUs differently."""
        torch.cuda.synchronize(buffer.device)
        _, *handle = buffer.untyped_storage()._share_cuda_()
        uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
        return {
            "gpu": uuid,
            "handle": [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in handle],
            "bytes_at": [index for index, value in enumerate(handle) if isinstance(value, bytes)],
        }

    @contextmanager
    def mapped(self, handle: Mapping[str, Any]) -> Iterator[Tensor]:
        """Open the sender's memory itself."""
        uuids = {str(torch.cuda.get_device_properties(n).uuid): n for n in range(torch.cuda.device_count())}
        if handle["gpu"] not in uuids:
            raise WeightSyncError(
                f"the sender's GPU {handle['gpu']} is not one of this engine's; policy.generation.weight_transport:"
                " cuda_ipc needs engines that see the GPUs of their machine's trainer"
            )
        values = [
            base64.b64decode(value) if index in handle["bytes_at"] else value
            for index, value in enumerate(handle["handle"])
        ]
        storage = torch.UntypedStorage._new_shared_cuda(uuids[handle["gpu"]], *values)
        yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.cuda.synchronize()  # what the loader has begun to copy is read before the sender may free it


@dataclass(frozen=True)
class IpcTransport:
    """Buckets that receivers read in the sender's memory, on one machine."""

    memory: SharedMemory = field(default_factory=CudaMemory)
    is_ordered: bool = field(default=False, init=False)

    def taken_from(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.memory.device()).contiguous()

    def write(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> object:
        """Write names, types, shapes, checksums and handle; the buffer must live until all have taken it."""
        buffer = packed(list(tensors.values()), self.memory.device())
        write_manifest(path, label, tensors, self.memory.shared(buffer))
        return buffer

    def deliver(self, path: Path, label: BucketLabel, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: receivers open the memory."""

    @contextmanager
    def opened(self, path: Path, label: BucketLabel, receiver: int) -> Iterator[dict[str, Tensor]]:
        manifest = read_manifest(path, label)
        with self.memory.mapped(manifest.handle) as buffer:
            tensors = manifest.cut(buffer)
            compare(path.name, label, tensors, manifest.checksums)
            yield tensors


def packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of tensors in order, each at a multiple of 16, `[bytes]`."""
    buffer = torch.empty(sum(map(_padded, (tensor.nbytes for tensor in tensors))), dtype=torch.uint8, device=device)
    begin = 0
    for tensor in tensors:
        buffer[begin : begin + tensor.nbytes] = tensor.flatten().view(torch.uint8)
        begin += _padded(tensor.nbytes)
    return buffer


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Manifest:
    tensors: Sequence[tuple[str, str, Sequence[int]]]
    checksums: Mapping[str, str]
    handle: Mapping[str, Any]

    def _sizes(self) -> Iterator[tuple[str, torch.dtype, Sequence[int], int]]:
        for name, kind, shape in self.tensors:
            dtype: torch.dtype = getattr(torch, kind)
            yield name, dtype, shape, prod(shape) * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Total bytes, with alignment gaps."""
        return sum(_padded(num_bytes) for *_, num_bytes in self._sizes())

    def cut(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors in the buffer's memory."""
        found, begin = {}, 0
        for name, dtype, shape, num_bytes in self._sizes():
            found[name] = buffer[begin : begin + num_bytes].view(dtype).view(tuple(shape))
            begin += _padded(num_bytes)
        return found


def write_manifest(
    path: Path, label: BucketLabel, tensors: Mapping[str, Tensor], handle: Mapping[str, Any] | None = None
) -> None:
    rows = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    checksums = {name: tensor_checksum(name, tensor) for name, tensor in tensors.items()}
    content = {"label": asdict(label), "tensors": rows, "checksums": checksums, "handle": dict(handle or {})}
    path.write_text(json.dumps(content), encoding="utf-8")


def read_manifest(path: Path, label: BucketLabel) -> Manifest:
    """Read what a bucket holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = BucketLabel(**content.pop("label"))
        manifest = Manifest(**content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise WeightSyncError(f"{path.name} cannot be read: {error}") from error
    if found != label:
        raise WeightSyncError(f"{path.name} is {found}; expected {label}")
    return manifest


TransportBackendFactory = Callable[[int, str], TransportBackend]


def make_backend(way: str, group: str, num_receivers: int, address: str | None) -> TransportBackend:
    """Make the transport that `policy.generation.weight_transport` names."""
    if way == "cuda_ipc":
        return IpcTransport()
    if way in ("gloo", "nccl"):
        backend: Literal["gloo", "nccl"] = "gloo" if way == "gloo" else "nccl"
        return CollectiveTransport(backend, group, num_receivers, COLLECTIVE_TIMEOUT_S, address)
    return FileTransport()

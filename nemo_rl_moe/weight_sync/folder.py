# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One transfer of weights, by notes on a board: a folder in shared memory on one machine, a store between machines.

Each note appears atomically. In a folder the notes are files:

    0003-000012.bucket                  bucket 12 of sender 3: its checksums, and its bytes or a handle to them
    000045.order                        the name of the bucket to take after 45 others
    0003-000012.bucket.taken-0001       receiver 1 has taken this bucket; the sender deletes it after all have
    0003.end                            sender 3 has sent everything: numbers of buckets, tensors and bytes, version
    failed                              why the transfer ended early
    0003.sender-at, 0001.receiver-at    the device of a process, if only processes on one device exchange tensors
"""

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.weight_sync.board import FAILED, Board, EndedByOtherError, FolderBoard, NetworkBoard, names_of
from nemo_rl_moe.weight_sync.bucket import BucketLabel
from nemo_rl_moe.weight_sync.transport_backends import BUCKET_BYTES, FileTransport, TransportBackend

NamedTensor = tuple[str, torch.Tensor]
MAX_UNACKNOWLEDGED = 2
STALL_TIMEOUT_S = 120.0
_SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.01


@dataclass(frozen=True)
class TransportSpec:
    """One transfer of weights, pickled to its participants.

    Attributes:
        folder: A new folder that all processes reach. If `store` is given, only the name of the folder is used.
        store: Key-value store for the notes, in place of the folder. None if all processes reach the folder.
        max_unacknowledged: Maximum number of buckets of a sender that some receiver has not taken yet.
        stall_timeout_s: Seconds without progress after which a process gives up, as a killed peer leaves no trace.
        changed_only: Whether frozen weights are not sent, because all receivers have them from an earlier transfer.
    """

    folder: Path
    version: int
    num_senders: int
    num_receivers: int
    bucket_bytes: int = BUCKET_BYTES
    max_unacknowledged: int = MAX_UNACKNOWLEDGED
    stall_timeout_s: float = STALL_TIMEOUT_S
    backend: TransportBackend = FileTransport()  # noqa: RUF009  (it cannot change)
    store: NetworkBoard | None = None
    changed_only: bool = False

    @property
    def board(self) -> Board:
        return FolderBoard(self.folder) if self.store is None else self.store

    def send(self, tensors: Iterable[NamedTensor], sender: int, version: int) -> int:
        """Send this rank's tensors, a bucket at a time. Return their number of bytes after all receivers have them.

        Every trainer rank must call this method. A WeightSyncError ends the transfer for all.

        Args:
            tensors: Hugging Face names and full tensors, consumed one at a time. They must not change afterwards.
        """
        with self._reporting(f"sender {sender}"):
            if version != self.version:
                raise WeightSyncError(f"it has the weights of version {version}, expected {self.version}")
            return _Sender(self, sender).send(tensors)

    def receive(self, receiver: int, load: Callable[[Iterator[NamedTensor]], object]) -> int:
        """Pass the tensors of all senders to a loader. Return the number of bytes.

        Every engine worker must call this method. An error of `load` ends the transfer for all, and is raised here
        unchanged. After any error the worker may have a mixture of old and new weights.

        Args:
            load: Must consume all tensors. They come in any order. A tensor is valid only until the next one: copy it
                to keep it.
        """
        with self._reporting(f"receiver {receiver}"):
            arrivals = _Receiver(self, receiver)
            tensors = arrivals.tensors()
            load(tensors)
            if left := sum(1 for _ in tensors):
                raise WeightSyncError(f"its loader did not take the last {left} tensors")
            return arrivals.num_bytes

    def label(self, sender: int, bucket: int) -> BucketLabel:
        """Return the label of a bucket. The folder's name identifies the transfer."""
        return BucketLabel(self.folder.name, self.version, sender, bucket)

    def queue(self, name: str, after: int) -> int:
        """Append a bucket to the order in which receivers take buckets, at the first free position from `after` on.

        Returns the position.
        """
        while not self.board.put_first(_order_name(after), name):
            after += 1
        return after

    def abort(self, reason: str) -> None:
        """End the transfer for all participants. The reason of the first call is kept."""
        with suppress(WeightSyncError):  # the driver has closed it already
            self.board.put_first(FAILED, reason)

    def names(self) -> set[str]:
        """Return the names of the notes. Raise if the transfer has failed."""
        return names_of(self.board)

    def meet(self, own: str, number: int, other: str, num_others: int) -> list[int]:
        """Return the numbers of the peers that this process sends to or receives from.

        Waits for all peers and returns the peers on this process's device if the transport requires one device.
        Otherwise returns all peers.

        Args:
            own: Side of this process, `sender` or `receiver`. `other` is the other side.
            number: Number of this process on its side.
        """
        if (place := self.backend.place()) is None:
            return list(range(num_others))
        self.board.put(_place_name(own, number), place)
        others = [_place_name(other, each) for each in range(num_others)]
        stall = _Stall(self.stall_timeout_s)
        while missing := [each for each in others if each not in self.names()]:
            stall.pause(", ".join(missing))
        places = [self.board.read(name) for name in others]
        return [each for each in range(num_others) if places[each] == place]

    @contextmanager
    def _reporting(self, who: str) -> Iterator[None]:
        """Report an error of this process to the other processes."""
        try:
            yield
        except EndedByOtherError as error:
            raise WeightSyncError(str(error)) from None
        except WeightSyncError as error:
            self.abort(f"{who}: {error}")
            raise WeightSyncError(f"{who}: {error}") from error.__cause__
        except BaseException as error:
            self.abort(f"{who} raised {type(error).__name__}: {error}")
            raise


class _Stall:
    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self.progressed()

    def progressed(self) -> None:
        self._since, self._pause = time.monotonic(), _SHORTEST_PAUSE_S

    def pause(self, waits_for: str) -> None:
        if time.monotonic() - self._since > self._timeout_s:
            raise WeightSyncError(f"waited for {self._timeout_s:g} s for {waits_for}")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)


_BUCKET = re.compile(r"\d+-\d+\.bucket")


def _bucket_name(sender: int, bucket: int) -> str:
    return f"{sender:04d}-{bucket:06d}.bucket"


def _taken_name(bucket_name: str, receiver: int) -> str:
    return f"{bucket_name}.taken-{receiver:04d}"


def _order_name(place: int) -> str:
    return f"{place:06d}.order"


def _place_name(kind: str, number: int) -> str:
    return f"{number:04d}.{kind}-at"


def _without(receivers: Sequence[int], bucket: str, names: set[str]) -> list[int]:
    """Return the receivers that have not yet taken a bucket."""
    return [each for each in receivers if _taken_name(bucket, each) not in names]


def _end_name(sender: int) -> str:
    return f"{sender:04d}.end"


class _Sender:
    def __init__(self, transfer: TransportSpec, sender: int):
        self._transfer, self._sender = transfer, sender
        self._receivers = transfer.meet("sender", sender, "receiver", transfer.num_receivers)
        self._unacknowledged: deque[tuple[str, torch.Tensor | None]] = deque()
        self._place = -1
        self._num_buckets = self._num_tensors = self._num_bytes = 0

    def send(self, tensors: Iterable[NamedTensor]) -> int:
        """Send everything, wait until all of it has been taken, and return the number of bytes."""
        bucket: list[NamedTensor] = []
        num_bytes = 0
        is_alone = self._transfer.backend.place() is not None and not self._receivers
        for name, tensor in () if is_alone else tensors:
            if bucket and num_bytes + tensor.nbytes > self._transfer.bucket_bytes:
                self._send_bucket(bucket)
                bucket, num_bytes = [], 0
            bucket.append((name, tensor))
            num_bytes += tensor.nbytes
        if bucket:
            self._send_bucket(bucket)
        end = {
            "buckets": self._num_buckets,
            "tensors": self._num_tensors,
            "bytes": self._num_bytes,
            "version": self._transfer.version,
        }
        self._transfer.board.put(_end_name(self._sender), json.dumps(end))
        self._wait_for_room(0)
        return self._num_bytes

    def _send_bucket(self, bucket: list[NamedTensor]) -> None:
        self._wait_for_room(self._transfer.max_unacknowledged - 1)
        content: dict[str, torch.Tensor] = {}
        for name, tensor in bucket:
            if name in content:
                raise WeightSyncError(f"it has two tensors of the name {name}")
            content[name] = tensor
        name = _bucket_name(self._sender, self._num_buckets)
        label = self._transfer.label(self._sender, self._num_buckets)
        backend, board = self._transfer.backend, self._transfer.board
        buffer = backend.publish(board, name, label, content)
        self._unacknowledged.append((name, buffer))
        if backend.is_ordered:
            self._place = self._transfer.queue(name, self._place + 1)
        backend.deliver(board, label, buffer)
        self._num_buckets += 1
        self._num_tensors += len(content)
        self._num_bytes += sum(tensor.nbytes for tensor in content.values())

    def _wait_for_room(self, most: int) -> None:
        """Delete the buckets that all receivers have taken, until at most `most` are left."""
        transfer = self._transfer
        stall = _Stall(transfer.stall_timeout_s)
        acknowledged = -1
        while True:
            names = transfer.names()
            while self._unacknowledged and not _without(self._receivers, self._unacknowledged[0][0], names):
                bucket = self._unacknowledged.popleft()[0]
                transfer.board.remove([bucket, *(_taken_name(bucket, each) for each in self._receivers)])
            if len(self._unacknowledged) <= most:
                return
            oldest, _ = self._unacknowledged[0]
            missing = _without(self._receivers, oldest, names)
            if oldest not in names:
                raise WeightSyncError(f"{oldest} is gone before receivers {missing} have taken it")
            if (found := sum(".taken-" in name for name in names)) != acknowledged:
                acknowledged = found
                stall.progressed()
            stall.pause(f"receivers {missing} to take {oldest}")


class _Receiver:
    def __init__(self, transfer: TransportSpec, receiver: int):
        self._transfer, self._receiver = transfer, receiver
        self._senders = transfer.meet("receiver", receiver, "sender", transfer.num_senders)
        if not self._senders:
            raise WeightSyncError(
                f"no rank of the trainer is on its device, {transfer.backend.place()};"
                " policy.generation.weight_transport: cuda_ipc needs engines on the trainer's GPUs"
            )
        self._num_buckets = [0] * transfer.num_senders
        self._num_tensors = [0] * transfer.num_senders
        self._num_bytes = [0] * transfer.num_senders
        self._place = 0
        self._names: set[str] = set()

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes)

    def tensors(self) -> Iterator[NamedTensor]:
        pending = list(self._senders)
        stall = _Stall(self._transfer.stall_timeout_s)
        while pending:
            names = self._transfer.names()
            before = sum(self._num_buckets), len(pending)
            for sender, name in self._arrived(pending, names):
                yield from self._bucket(sender, name)
                self._num_buckets[sender] += 1
                self._transfer.board.put(_taken_name(name, self._receiver), "")
            pending = [sender for sender in pending if not self._has_ended(sender, names)]
            if (sum(self._num_buckets), len(pending)) != before:
                stall.progressed()
            elif pending:
                stall.pause(self._waits_for(pending, names))

    def _arrived(self, pending: list[int], names: set[str]) -> Iterator[tuple[int, str]]:
        """Yield sender and name of each new bucket, in the global order if the transport has one."""
        if not self._transfer.backend.is_ordered:
            for sender in pending:
                while (name := _bucket_name(sender, self._num_buckets[sender])) in names:
                    yield sender, name
            return
        while (place := _order_name(self._place)) in names:
            name = self._transfer.board.read(place)
            self._place += 1
            yield int(name.partition("-")[0]), name

    def _waits_for(self, senders: list[int], names: set[str]) -> str:
        """Return, for an error message, what this receiver waits for.

        If other receivers have not taken their buckets, the senders wait for them, and so does this receiver.
        Otherwise this receiver waits for tensors of the senders.
        """
        sends_to_all = self._transfer.backend.place() is None
        receivers = list(range(self._transfer.num_receivers)) if sends_to_all else [self._receiver]
        buckets = [name for name in names if _BUCKET.fullmatch(name) and int(name.partition("-")[0]) in senders]
        held_up = {each for name in buckets for each in _without(receivers, name, names)}
        return f"receivers {sorted(held_up)} to take their buckets" if held_up else f"tensors of senders {senders}"

    def _bucket(self, sender: int, name: str) -> Iterator[NamedTensor]:
        label = self._transfer.label(sender, self._num_buckets[sender])
        with self._transfer.backend.opened(self._transfer.board, name, label, self._receiver) as tensors:
            for key, tensor in tensors.items():
                if key in self._names:
                    raise WeightSyncError(f"{key} was sent twice")
                self._names.add(key)
                self._num_tensors[sender] += 1
                self._num_bytes[sender] += tensor.nbytes
                yield key, tensor

    def _has_ended(self, sender: int, names: set[str]) -> bool:
        """Return whether a sender has sent everything and all of it has arrived."""
        if _end_name(sender) not in names:
            return False
        end = json.loads(self._transfer.board.read(_end_name(sender)))
        found = {
            "buckets": self._num_buckets[sender],
            "tensors": self._num_tensors[sender],
            "bytes": self._num_bytes[sender],
            "version": self._transfer.version,
        }
        if found["buckets"] < end["buckets"]:  # `names` may have been listed before the last buckets came
            return False
        if found != end:
            raise WeightSyncError(f"sender {sender} has sent {end}, and {found} arrived")
        return True

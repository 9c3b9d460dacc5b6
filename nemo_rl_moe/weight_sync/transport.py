# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight transports: tensors from the trainer's ranks to the workers of a generation engine, in buckets.

The driver opens a transfer and gives its picklable specification to both sides. All trainer ranks send while all engine
workers receive. The driver never holds a tensor. Full tensors are sent under their Hugging Face names.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.distributed import TCPStore

from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY, folder_of_this_process
from nemo_rl_moe.weight_sync.board import NetworkBoard, serve_store
from nemo_rl_moe.weight_sync.folder import (
    LONGEST_PAUSE_S,
    MAX_UNACKNOWLEDGED,
    STALL_TIMEOUT_S,
    NamedTensor,
    TransportSpec,
)
from nemo_rl_moe.weight_sync.transport_backends import BUCKET_BYTES, FileTransport, TransportBackendFactory

__all__ = ["NamedTensor", "TransportSpec", "WeightTransport", "folder_of_one_machine"]


class WeightTransport:
    """The driver's side of one transfer, through a folder that exists while this object is open.

    The folder of a killed driver is removed by the next transport on the same machine.

    Args:
        bucket_bytes: Size of a bucket; None for the default of the transport.
        address: Address of this machine for processes on other machines. The processes then exchange notes (on sent and
            taken buckets) through a key-value store. If None, they exchange notes through the folder.
        may_skip_frozen: Whether the previous transfer included the current frozen weights. Receivers that still hold
            them then need only the other weights.

    Attributes:
        num_bytes: Number of bytes sent by all ranks; 0 until `send` has returned.
    """

    def __init__(
        self,
        parent: Path,
        num_senders: int,
        send: Callable[[TransportSpec], int],
        *,
        bucket_bytes: int | None = None,
        max_unacknowledged: int = MAX_UNACKNOWLEDGED,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        make_backend: TransportBackendFactory = lambda num_receivers, receivers: FileTransport(),
        address: str | None = None,
        may_skip_frozen: bool = False,
    ):
        self._may_skip_frozen = may_skip_frozen
        self._address = address
        self._store: TCPStore | None = None
        self._parent, self._num_senders, self._send = parent, num_senders, send
        self._bucket_bytes, self._max_unacknowledged = bucket_bytes, max_unacknowledged
        self._stall_timeout_s = stall_timeout_s
        self._make_backend = make_backend
        self._folder: Path | None = None
        self._transfer: TransportSpec | None = None
        self.num_bytes = 0

    def __enter__(self) -> Self:
        self._folder = folder_of_this_process(self._parent, "weights")
        self._store = None if self._address is None else serve_store(self._address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._folder is not None  # entered
        if error is not None:
            self.abort(f"the driver raised {type(error).__name__}: {error}")
        self._store = None
        # A process that has not noticed the end may still write into the folder.
        for _ in range(10):
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._folder.exists():
                return
            time.sleep(LONGEST_PAUSE_S)

    def open(
        self, num_receivers: int, version: int, receivers: str = "", *, hold_weights: bool = False
    ) -> TransportSpec:
        """Open the transfer, and return its specification.

        Args:
            receivers: Name of the receiving processes. Transfers with the same name reuse connections.
            hold_weights: Whether all receivers hold the weights of the previous transfer, and can keep some of them.
        """
        if self._folder is None or self._transfer is not None:
            raise RuntimeError("enter the transport as a context manager before opening it, and open it only once")
        backend = self._make_backend(num_receivers, receivers)
        self._transfer = TransportSpec(
            folder=self._folder,
            version=version,
            num_senders=self._num_senders,
            num_receivers=num_receivers,
            bucket_bytes=self._bucket_bytes or backend.bucket_bytes,
            max_unacknowledged=self._max_unacknowledged,
            stall_timeout_s=self._stall_timeout_s,
            backend=backend,
            store=None if self._store is None else NetworkBoard(self._store.host, self._store.port),
            changed_only=self._may_skip_frozen and hold_weights,
        )
        return self._transfer

    def send(self) -> int:
        """Make all trainer ranks send. Return the total number of bytes.

        Requires that the receivers have been started. After a WeightSyncError the trainer's ranks stay usable.
        """
        if self._transfer is None:
            raise RuntimeError("open the transport before sending")
        try:
            self.num_bytes = self._send(self._transfer)
            return self.num_bytes
        except BaseException as error:  # a sender that died has not reported it
            self.abort(f"the trainer's ranks ended: {error}")
            raise

    def abort(self, reason: str) -> None:
        """End the transfer for all participants. Any thread may call this. The reason of the first call is kept."""
        if self._transfer is not None:
            self._transfer.abort(reason)


def folder_of_one_machine(num_senders: int) -> Path:
    """Return the folder for a transfer on one machine.

    It is in shared memory if this has room for twice the buckets in flight. Otherwise it is the temporary folder, since
    containers have only 64 MiB of shared memory by default.
    """
    needed = 2 * num_senders * MAX_UNACKNOWLEDGED * BUCKET_BYTES
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= needed
    return SHARED_MEMORY if has_room else Path(tempfile.gettempdir())

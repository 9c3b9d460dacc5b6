# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight transports: tensors from the trainer's ranks to the workers of a generation engine, in buckets.

The driver opens a transfer and hands its picklable specification to both sides. All trainer ranks send while all engine
workers receive; the driver never holds a tensor. Only Hugging Face names and full tensors cross.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from torch import Tensor

NamedTensor = tuple[str, Tensor]


class TransportSpec(Protocol):
    """One transfer of weights, in a form that is pickled to its participants."""

    def send(self, tensors: Iterable[NamedTensor], sender: int, version: int) -> int:
        """Send this rank's tensors, a bucket at a time, and return the bytes; every trainer rank calls it.

        Args:
            tensors: Hugging Face names and full tensors; taken one at a time, and not to be changed afterwards.

        Raises:
            WeightSyncError: A receiver failed or has stopped taking buckets, or the transfer is of another version.
        """
        ...

    def receive(self, receiver: int, load: Callable[[Iterator[NamedTensor]], object]) -> int:
        """Pass the tensors of all senders to a loader, and return the bytes; every engine worker calls it.

        Args:
            load: Takes each tensor once, in any order, and all before it returns. A tensor is valid only until the next
                one: what is kept is copied.

        Raises:
            WeightSyncError: A sender failed or has stopped sending, or not every tensor arrived once; the weights are
                then a mixture. What `load` raises ends the transfer for all, and is raised here unchanged.
        """
        ...


class WeightTransport(Protocol):
    """The driver's side of one transfer.

    Attributes:
        num_bytes: Bytes sent by all ranks; 0 before `send` has returned.
    """

    num_bytes: int

    def open(self, num_receivers: int, version: int, receivers: str = "") -> TransportSpec:
        """Open the transfer.

        Args:
            receivers: Identifies the receiving processes: connections to the same ones are kept.
        """
        ...

    def send(self) -> int:
        """Make all trainer ranks send, and return the bytes of all; the receivers have been started.

        Raises:
            WeightSyncError: Not every tensor was sent and taken. The trainer's ranks stay usable.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the transfer early for all that take part; may be called from any thread."""
        ...

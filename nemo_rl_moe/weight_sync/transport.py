# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight transports: tensors from the trainer's ranks to the workers of a generation engine, in buckets.

The driver opens a transfer and hands its picklable specification to both sides. All trainer ranks send at the same time
as all engine workers receive; the driver itself never holds a tensor. Only Hugging Face names and full tensors cross.
What a specification holds is the transport's own: a folder here, the address of a rendezvous for NCCL, say.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from torch import Tensor

NamedTensor = tuple[str, Tensor]


class TransportSpec(Protocol):
    """One transfer of weights, in a form that is pickled to the processes that take part in it."""

    def send(self, tensors: Iterable[NamedTensor], sender: int, version: int) -> int:
        """Sends this rank's tensors, a bucket at a time; every trainer rank calls it, also with nothing to send.

        Args:
            tensors: Hugging Face names and full tensors; taken one at a time, and not to be changed afterwards.
            sender: The trainer's rank.
            version: Optimizer steps of the weights that it has.

        Returns:
            Bytes sent.

        Raises:
            WeightSyncError: A receiver failed or has stopped taking buckets, or the weights have another version than
                the transfer.
        """
        ...

    def receive(self, receiver: int, load: Callable[[Iterator[NamedTensor]], object]) -> int:
        """Gives the tensors of all senders to a loader; every engine worker calls it.

        Args:
            receiver: Number of the engine's worker, from 0.
            load: Takes each tensor once, in no order that is agreed, and all of them before it returns. A tensor's
                memory is its own only until the next one is taken: what is kept is copied.

        Returns:
            Bytes received.

        Raises:
            WeightSyncError: A sender failed or has stopped sending, or not every tensor arrived once. The weights are
                then a mixture. What `load` raises ends the transfer for all, and is raised here as it is.
        """
        ...


class WeightTransport(Protocol):
    """The driver's side of one transfer.

    Attributes:
        num_bytes: Bytes sent by all ranks together; 0 before `send` has returned.
    """

    num_bytes: int

    def open(self, num_receivers: int, version: int, receivers: str = "") -> TransportSpec:
        """Opens the transfer.

        Args:
            num_receivers: Workers of the engine; each of them receives every tensor.
            version: Optimizer steps of the weights that they are to have afterwards.
            receivers: Text that is another one when other processes receive: connections to these are kept.
        """
        ...

    def send(self) -> int:
        """Has all trainer ranks send, and returns when they have; called after the receivers have been started.

        Returns:
            Bytes sent by all ranks together.

        Raises:
            WeightSyncError: Not every tensor was sent and taken. The trainer's ranks go on working.
        """
        ...

    def abort(self, reason: str) -> None:
        """Ends the transfer early for all that take part in it, also from another thread than that which sends.

        Args:
            reason: Of the errors that they raise; where there is one already, that one stays.
        """
        ...

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight transports: tensors from the trainer's ranks to the workers of a generation engine, in buckets.

The driver opens a transport and hands its picklable `spec` to both sides. All trainer ranks send at the same time as
all engine workers receive; the driver itself never holds a tensor. Only Hugging Face names and full tensors cross.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from torch import Tensor

NamedTensor = tuple[str, Tensor]


class TransportSpec(Protocol):
    """One transfer of weights, in a form that is pickled to the processes that take part in it."""

    def send(self, tensors: Iterable[NamedTensor], sender: int) -> int:
        """Sends this rank's tensors, a bucket at a time; a trainer rank calls it, also with nothing to send.

        Args:
            tensors: Hugging Face names and full tensors; taken one at a time.
            sender: The trainer's rank.

        Returns:
            Bytes sent.

        Raises:
            WeightSyncError: A receiver failed or has stopped taking buckets.
        """
        ...

    def receive(self, receiver: int) -> Iterator[NamedTensor]:
        """Tensors of all senders, each once, in the order in which they arrive; an engine worker calls it.

        A tensor's memory is reused after the next one has been asked for: copy what is kept.

        Args:
            receiver: Number of the engine's worker.

        Raises:
            WeightSyncError: A sender failed, or has stopped sending before its end.
        """
        ...


class WeightTransport(Protocol):
    """The driver's side of one transfer.

    Attributes:
        spec: What the receivers get.
        send: Has all trainer ranks send, and returns when they have; called after the receivers have been started.
    """

    @property
    def spec(self) -> TransportSpec: ...
    @property
    def send(self) -> Callable[[], None]: ...

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A second set of weights for the same modules: the reference model lives in the worker that trains."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """The weights that a model has now, kept on the host.

    Args:
        chunks: The model's chunks on this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]):
        self._live = [tensor for chunk in chunks for tensor in _weights(chunk)]
        # Pinned memory is copied to a GPU several times faster.
        self._kept = [tensor.detach().to("cpu", copy=True) for tensor in self._live]
        if any(tensor.is_cuda for tensor in self._live):
            self._kept = [tensor.pin_memory() for tensor in self._kept]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, the model has the reference's weights; afterwards its own again, to the last bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # One tensor at a time: nothing but the largest of them is ever held a third time.
        for live, kept in zip(self._live, self._kept, strict=True):
            current = live.detach().to("cpu", copy=True)
            live.copy_(kept)
            kept.copy_(current)


def _weights(chunk: nn.Module) -> Iterator[Tensor]:
    """Parameters, and the buffers that belong to the weights (a router's expert bias)."""
    persistent = chunk.state_dict(keep_vars=True)
    tensors = {id(value): value for value in persistent.values() if isinstance(value, Tensor)}
    yield from tensors.values()

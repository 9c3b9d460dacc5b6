# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a model's tensors on the host, for a checkpoint that is written during training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.model.host_memory import fit, host_tensors


class Snapshots:
    """Snapshots of one rank, one at a time.

    On a GPU a separate stream copies into pinned memory, which the next snapshot reuses, and the host does not wait.

    Args:
        is_frozen: Whether a tensor stays the same until the snapshot is written, so that it needs no copy.
    """

    def __init__(self, device: torch.device, is_frozen: Callable[[Tensor], bool] = lambda tensor: False):
        self._is_on_gpu, self._is_frozen = device.type == "cuda", is_frozen
        self._stream: Any = None
        self._copied: Any = None
        self._kept: list[Tensor] = []
        self.has_frozen = False

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a tensor on the host for each tensor, or the tensor itself if it is frozen.

        The tensors on the host have the current values only after `wait`, because the copies run in the background.
        """
        frozen = [self._is_frozen(tensor) for tensor in tensors]
        self.has_frozen = any(frozen)
        copied = [tensor.detach() for tensor, stays in zip(tensors, frozen, strict=True) if not stays]
        copies = iter(self._on_their_way(copied) if self._is_on_gpu else [t.to("cpu", copy=True) for t in copied])
        return [tensor.detach() if stays else next(copies) for tensor, stays in zip(tensors, frozen, strict=True)]

    def _on_their_way(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not fit(self._kept, tensors):
            self._kept = host_tensors(tensors, pinned=True)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for host, tensor in zip(self._kept, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
        self._copied = self._stream.record_event()
        return self._kept

    def before_changes(self) -> None:
        """Let the device wait for the copies. Must be called before the tensors change."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait for the copies, from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Room on the device while nothing trains: the optimizer's state moves to the host, and gradient buffers are freed."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import device_optimizers, optimizer_parts
from nemo_rl_moe.models.megatron.model.host_memory import fit, host_tensors


class HostState:
    """State that only training needs on the device. It moves to the host and back bit by bit.

    The tensor objects stay the same, so optimizers and checkpoints find them on the device and on the host. Gradients
    are not kept, because each global batch begins with zeros.
    """

    def __init__(self, optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel], device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._model = [module for chunk in chunks for module in (*chunk.module.parameters(), *chunk.module.buffers())]
        self._gradients = [
            buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        self._moved: list[Tensor] = []
        self._on_host: list[Tensor] = []
        self._slabs: set[int] = set()
        self._gradient_bytes: list[int] = []
        self._wait_for_readers: Callable[[], object] = lambda: None
        self.is_away = False

    @torch.no_grad()
    def leave(self) -> int:
        """Move the state to the host, free the gradient buffers, and return the number of freed bytes on the device."""
        if self.is_away:
            return 0
        self._moved = list(self._tensors())
        self._wait_for_readers()
        if not fit(self._on_host, self._moved):
            self._on_host = host_tensors(self._moved, pinned=self._device.type == "cuda")
            self._slabs = {host.untyped_storage().data_ptr() for host in self._on_host}
        for tensor, host in zip(self._moved, self._on_host, strict=True):
            host.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()  # the copies are complete only now
        for tensor, host in zip(self._moved, self._on_host, strict=True):
            tensor.data, tensor.grad = host, None
        self._gradient_bytes = [gradients.untyped_storage().nbytes() for gradients in self._gradients]
        for gradients in self._gradients:
            gradients.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # for engines in other processes
        self.is_away = True
        return sum(tensor.nbytes for tensor in self._moved) + sum(self._gradient_bytes)

    @torch.no_grad()
    def come_back(self) -> None:
        """Move the state back to the device and allocate zeroed gradient buffers, if the state is away."""
        if not self.is_away:
            return
        for tensor, host in zip(self._moved, self._on_host, strict=True):
            tensor.data = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
        for gradients, num_bytes in zip(self._gradients, self._gradient_bytes, strict=True):
            gradients.untyped_storage().resize_(num_bytes)
            gradients.zero_()
        self._moved = []
        self.is_away = False

    def is_frozen(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the host memory of the moved state. If so, only the next `leave` changes it."""
        return self.is_away and tensor.untyped_storage().data_ptr() in self._slabs

    def hold(self, wait: Callable[[], object]) -> None:
        """Let the next `leave` first call `wait`, which waits for a reader of the host memory."""
        self._wait_for_readers = wait

    def _tensors(self) -> Iterator[Tensor]:
        """Yield each master and moment on the device once, but no weight that is updated in place."""
        seen = {tensor.untyped_storage().data_ptr() for tensor in self._model}
        for inner in chain.from_iterable(map(device_optimizers, optimizer_parts(self._optimizer))):
            masters = [parameter for group in inner.param_groups for parameter in group["params"]]
            of_states = [
                value
                for state in inner.state.values()
                for name, value in state.items()
                if isinstance(value, Tensor) and name != "step"
            ]
            for tensor in (*masters, *of_states):
                address = tensor.untyped_storage().data_ptr()
                if tensor.device == self._device and tensor.numel() and address not in seen:
                    seen.add(address)
                    yield tensor

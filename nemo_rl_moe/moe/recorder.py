# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the routers' assignments on the device while training runs: no host synchronisation, nothing in the graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

FORWARD, BACKWARD = 1, -1


class StepEvent(NamedTuple):
    """One pass of one model chunk over one microbatch, in the order in which the schedule ran it.

    Attributes:
        kind: `FORWARD` or `BACKWARD`.
        chunk: Index of the model chunk on this pipeline stage (virtual stage).
        microbatch: Index within the `train()` call.
    """

    kind: int
    chunk: int
    microbatch: int


class ExpertLoadRecorder:
    """The counts `c[m,i,e]` of one `train()` call, and the order of its forward and backward passes.

    Only what runs inside `training_forward` is counted. A recomputed forward runs inside the backward pass, evaluation,
    log-prob and generation forwards do not enter it, so neither is ever counted; and the microbatch is the one that the
    caller names, whatever the schedule started last.

    Args:
        num_moe_layers: MoE layers of the whole model; each rank fills the rows of those that it holds.
        num_experts: Routed experts of a layer.
        device: Where the routers run.
    """

    def __init__(self, num_moe_layers: int, num_experts: int, device: torch.device):
        self._shape = (num_moe_layers, num_experts)
        self._device = device
        self._microbatch: int | None = None
        self.counts: Int[Tensor, "microbatches moe_layers experts"] = torch.zeros(0, *self._shape, dtype=torch.long)
        self.events: list[StepEvent] = []

    def start(self, num_microbatches: int) -> None:
        """Clears what was recorded and makes room for so many microbatches."""
        self.events = []
        if self.counts.shape[0] == num_microbatches:
            self.counts.zero_()
        else:
            self.counts = torch.zeros(num_microbatches, *self._shape, dtype=torch.long, device=self._device)

    @contextmanager
    def training_forward(self, chunk: int, microbatch: int) -> Iterator[None]:
        """While open, the routers' assignments count for this microbatch."""
        self.events.append(StepEvent(FORWARD, chunk, microbatch))
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    def watch_backward(self, output: Tensor, chunk: int, microbatch: int) -> None:
        """Notes when the backward pass of this forward begins. `output` is what the chunk returned."""
        if output.requires_grad:
            output.register_hook(lambda _: self.events.append(StepEvent(BACKWARD, chunk, microbatch)))

    def add_map(
        self,
        layer_position: int,
        routing_map: Bool[Tensor, "tokens experts"],
        padding: Bool[Tensor, " tokens"] | None,
    ) -> None:
        """Adds one router call from its map of assignments; does nothing outside `training_forward`."""
        if self._microbatch is None:
            return
        if padding is not None:
            routing_map = routing_map & ~padding[:, None]
        self.counts[self._microbatch, layer_position] += routing_map.sum(0)

    def add_indices(
        self,
        layer_position: int,
        expert_indices: Int[Tensor, "tokens topk"],
        padding: Bool[Tensor, " tokens"] | None,
    ) -> None:
        """The same from the chosen experts' numbers."""
        if self._microbatch is None:
            return
        # bincount would synchronise on an accelerator; scatter_add does not.
        valid = (
            torch.ones_like(expert_indices) if padding is None else (~padding).long()[:, None].expand_as(expert_indices)
        )
        self.counts[self._microbatch, layer_position].scatter_add_(0, expert_indices.reshape(-1), valid.reshape(-1))

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the routers' assignments on the device while training runs: no host synchronisation, nothing in the graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nemo_rl_moe.moe.assignment_counts import add_assignments

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

    def add(
        self,
        layer_position: int,
        chosen: Bool[Tensor, "tokens experts"] | Int[Tensor, "tokens topk"],
        padding: Bool[Tensor, " tokens"] | None,
    ) -> None:
        """Adds one router call; does nothing outside `training_forward`.

        Args:
            layer_position: Row of the layer.
            chosen: A map of the assignments, or the numbers of the chosen experts.
            padding: True on tokens that do not count; None: all count.
        """
        if self._microbatch is not None:
            valid = None if padding is None else ~padding
            add_assignments(self.counts[self._microbatch, layer_position], chosen, valid)

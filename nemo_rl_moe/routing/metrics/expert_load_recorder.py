# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts of routed experts on the device, without a host synchronisation, and their sums over ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.shapes import Bool, Int


def add_assignments(
    counts: Int[Tensor, " experts"],
    routed: Bool[Tensor, "tokens experts"] | Int[Tensor, "tokens topk"],
    valid: Bool[Tensor, " tokens"] | None,
) -> None:
    """Add the experts of one router call to the counts, in place. `routed` is a map or ids, `valid` masks tokens."""
    if routed.dtype == torch.bool:
        counts.add_((routed if valid is None else routed & valid[:, None]).sum(0))
        return
    # Not bincount, which waits for the device to find the largest id.
    routed = routed.long()
    ones = torch.ones_like(routed) if valid is None else valid.long()[:, None].expand_as(routed)
    counts.scatter_add_(0, routed.reshape(-1), ones.reshape(-1))


FORWARD, BACKWARD = 1, -1


class StepEvent(NamedTuple):
    """Forward or backward pass (`kind`) of one model chunk over one microbatch.

    Attributes:
        chunk: Index of the model chunk on this pipeline stage (virtual stage).
    """

    kind: int
    chunk: int
    microbatch: int


class ExpertLoadRecorder:
    """Counts `c[m,i,e]` (microbatch, MoE layer, expert) of one `train()` call, and the order of its forward and
    backward passes.

    Only passes inside `training_forward` count, so recomputed, evaluation, log-prob and generation passes do not.

    Attributes:
        counts: `c[m,i,e]` of this rank.
        image_counts: Counts of image tokens over all microbatches, if they are counted separately.
        expert_load: Load matrix of the last step over all ranks, once it has been reduced.
    """

    def __init__(self, num_moe_layers: int, num_experts: int, device: torch.device):
        self._shape = (num_moe_layers, num_experts)
        self._device = device
        self._microbatch: int | None = None
        self._indices: list[tuple[int, Tensor, Tensor | None]] = []
        self._is_image: Bool[Tensor, " tokens"] | None = None
        self._offsets: dict[tuple[int, ...], Tensor] = {}
        self.counts: Int[Tensor, "microbatches moe_layers experts"] = torch.zeros(0, *self._shape, dtype=torch.long)
        self.image_counts: Int[Tensor, "moe_layers experts"] | None = None
        self.events: list[StepEvent] = []
        self.expert_load: ExpertLoad | None = None

    def start(self, num_microbatches: int, *, counts_images: bool = False) -> None:
        """Clear the record and allocate counts for `num_microbatches`."""
        self.events = []
        self.image_counts = torch.zeros(self._shape, dtype=torch.long, device=self._device) if counts_images else None
        if self.counts.shape[0] == num_microbatches:
            self.counts.zero_()
        else:
            self.counts = torch.zeros(num_microbatches, *self._shape, dtype=torch.long, device=self._device)

    @contextmanager
    def training_forward(
        self, chunk: int, microbatch: int, is_image: Bool[Tensor, " tokens"] | None = None
    ) -> Iterator[None]:
        """Count the assignments of this microbatch inside the context. `is_image` is in the routers' order."""
        self.events.append(StepEvent(FORWARD, chunk, microbatch))
        self._microbatch = microbatch
        self._is_image = None if self.image_counts is None else is_image
        try:
            yield
            self._add_indices(self.counts[microbatch], self._indices, None)
            if self.image_counts is not None and self._is_image is not None:
                self._add_indices(self.image_counts, self._indices, self._is_image)
        finally:
            self._microbatch = self._is_image = None
            self._indices = []

    @property
    def is_recording(self) -> bool:
        """True inside `training_forward`."""
        return self._microbatch is not None

    def watch_backward(self, heads: Sequence[Tensor], chunk: int, microbatch: int) -> None:
        """Record a `StepEvent` when the backward pass of a chunk begins. `heads` are the outputs with a gradient."""
        event = StepEvent(BACKWARD, chunk, microbatch)
        register_multi_grad_hook(heads, lambda _: self.events.append(event), mode="any")

    def add(
        self,
        layer_position: int,
        routed: Bool[Tensor, "tokens experts"] | Int[Tensor, "tokens topk"],
        padding: Bool[Tensor, "..."] | None,
    ) -> None:
        """Count the experts of one router call: a map now, and ids at the end of `training_forward`.

        Does nothing outside of `training_forward`.
        """
        if self._microbatch is None:
            return
        if routed.dtype == torch.bool:
            add_assignments(self.counts[self._microbatch, layer_position], routed, _counted(padding, None))
            if self.image_counts is not None and self._is_image is not None:
                add_assignments(self.image_counts[layer_position], routed, _counted(padding, self._is_image))
        else:
            self._indices.append((layer_position, routed, padding))

    def _add_indices(
        self,
        counts: Int[Tensor, "moe_layers experts"],
        calls: Sequence[tuple[int, Tensor, Tensor | None]],
        only: Bool[Tensor, " tokens"] | None,
    ) -> None:
        """Count router calls. Calls with the same tokens are counted at once, to launch fewer operations."""
        alike: dict[Any, list[tuple[int, Tensor, Tensor | None]]] = {}
        for call in calls:
            _, routed, padding = call
            # Each layer has a separate view of the microbatch's mask.
            same = None if padding is None else (padding.data_ptr(), padding.stride())
            alike.setdefault((routed.shape, same), []).append(call)
        for group in alike.values():
            positions, padding = tuple(position for position, _, _ in group), group[0][2]
            if positions not in self._offsets:
                offsets = torch.tensor(positions, device=counts.device) * counts.shape[1]
                self._offsets[positions] = offsets[:, None, None]
            places = torch.stack([routed for _, routed, _ in group]) + self._offsets[positions]
            valid = _counted(padding, only)
            if valid is not None:
                valid = valid[:, None].expand_as(places[0]).expand_as(places).reshape(-1)
            add_assignments(counts.view(-1), places.view(-1, 1), valid)


def _counted(padding: Bool[Tensor, "..."] | None, only: Bool[Tensor, " tokens"] | None) -> Tensor | None:
    """Return a mask of the tokens in `only` that are no padding, or None for all tokens."""
    if padding is None:
        return only
    counted = ~padding.reshape(-1).bool()
    return counted if only is None else only & counted


def sum_over_ranks(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the sum of each tensor over all ranks of the job, as `reduce_over_ranks` does."""
    return reduce_over_ranks(parts, [], device)[0]


def reduce_over_ranks(
    sums: list[Tensor], maxima: list[Tensor], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sums and the maxima over all ranks, as float64 on the host. Each of the two takes one collective.

    A rank that has nothing to add passes zeros of the same shape, or values below any maximum. Counts below 2^53 are
    exact in float64.
    """
    packed = [
        torch.cat([part.to(device=device, dtype=torch.float64).reshape(-1) for part in parts]) if parts else None
        for parts in (sums, maxima)
    ]
    if dist.is_initialized() and dist.get_world_size() > 1:
        for values, operation in zip(packed, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            if values is not None:
                dist.all_reduce(values, op=operation)
    on_host = torch.cat([values for values in packed if values is not None]).cpu()
    both = [*sums, *maxima]
    pieces = on_host.split([part.numel() for part in both])
    shaped = [piece.view(part.shape) for piece, part in zip(pieces, both, strict=True)]
    return shaped[: len(sums)], shaped[len(sums) :]

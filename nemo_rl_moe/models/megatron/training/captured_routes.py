# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes of generation and log-probability passes, collected from all pipeline stages on the reporting rank.

The positions that indexers choose are collected in the same way.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from megatron.core import parallel_state
from torch import Tensor

from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch, SequenceCut
from nemo_rl_moe.routing.replay import UNKNOWN


class CapturingHooks(Protocol):
    """Hooks on the routers or indexers of a rank."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the model's layers with a router or an indexer."""

    @property
    def positions(self) -> list[list[int]]:
        """For each chunk, the indices of its layers among `layers`."""

    def shown(self) -> AbstractContextManager[None]: ...

    def take(self) -> Mapping[int, Sequence[Any]]:
        """Return index among `layers` -> choices of the passes since the last call, with an attribute `taken`."""


class StagesOfLayers:
    """The pipeline stage of each MoE layer, to gather the routed experts of all layers on the last stage.

    The stages are exchanged once, between the ranks of each pipeline.
    """

    def __init__(self, hooks: CapturingHooks, device: torch.device):
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._rank = self._group.rank()
        own = [position for positions in hooks.positions for position in positions]
        stages = torch.zeros(len(hooks.layers), dtype=torch.long, device=device)
        stages[own] = self._rank
        if self._group.size() > 1:
            dist.all_reduce(stages, group=self._group)
        self._layers = [(stages == stage).nonzero()[:, 0].to(device) for stage in range(self._group.size())]
        # The ranks of a stage that share its layers know the same routes, so one of them reports.
        self._reports = parallel_state.get_tensor_and_context_parallel_group().rank() == 0

    def gather(self, routes: Int[Tensor, "... moe_layers topk"]) -> None:
        """Fill in the layers of other stages on tensor and context rank 0 of the last stage. Every rank calls it."""
        last = self._group.size() - 1
        if last == 0 or not self._reports:
            return
        ranks = dist.get_process_group_ranks(self._group)
        if self._rank < last:
            own = routes.index_select(-2, self._layers[self._rank]).contiguous()
            if own.numel():
                dist.send(own.view(torch.uint8), dst=ranks[last], group=self._group)
            return
        for stage in range(last):
            layers = self._layers[stage]
            received = routes.index_select(-2, layers).contiguous()
            if received.numel():
                dist.recv(received.view(torch.uint8), src=ranks[stage], group=self._group)
                routes.index_copy_(-2, layers, received)


class Capturing(NamedTuple):
    """What a generation engine captures of the tokens' passes: routed experts, or positions of indexers.

    Attributes:
        topk: Number of chosen experts or positions of a token in a layer.
        dtype: Type of their ids.
    """

    hooks: CapturingHooks
    stages: StagesOfLayers
    topk: int
    dtype: torch.dtype


_MOST_PASSES_KEPT = 64


class CapturedRoutes:
    """Routed experts of the tokens of one generation batch, by slot (token position) of the key-value cache.

    The experts of many passes are concatenated at once, to save kernel launches. On small models, launches take most of
    the time of a pass over one token of each sequence.
    """

    def __init__(self, hooks: CapturingHooks, topk: int, device: torch.device, dtype: torch.dtype = torch.int16):
        self._hooks, self._topk, self._device, self._dtype = hooks, topk, device, dtype
        self._own = sorted(position for positions in hooks.positions for position in positions)
        self._rows_of_slots: list[Int[np.ndarray, " rows"]] = []
        self._num_kept = 0  # passes whose routes are still in the hooks
        self._joined: list[Int[Tensor, "own_layers tokens topk"]] = []
        hooks.take()

    def add(self, num_slots: int, rows: Int[np.ndarray, " rows"], copies: Int[Tensor, " rows"] | None = None) -> None:
        """Add the routed experts of a pass.

        Args:
            num_slots: Number of slots of the pass.
            rows: Sequence of each row of the batch.
            copies: Row of the pass that each row of the batch copies. None if the pass ran all rows of the batch.
        """
        self._rows_of_slots += [rows] * num_slots
        self._num_kept += 1
        # If a pass has several columns, a layer may run twice: the second time only over the last column. The second
        # run is skipped.
        if num_slots > 1 or copies is not None or self._num_kept == _MOST_PASSES_KEPT:
            self._join()
        if copies is not None and self._joined:
            by_slot = self._joined[-1].unflatten(1, (num_slots, -1))
            self._joined[-1] = by_slot.index_select(2, copies).flatten(1, 2)

    def _join(self) -> None:
        taken = self._hooks.take()
        chosen = [each.taken for position in self._own for each in taken[position][: self._num_kept]]
        self._num_kept = 0
        if chosen:  # none on a stage without MoE layers
            self._joined.append(torch.cat(chosen).to(self._dtype).view(len(self._own), -1, self._topk))

    def sequences(
        self, stages: StagesOfLayers, first_slots: Int[np.ndarray, " rows"], num_fed: Int[np.ndarray, " rows"]
    ) -> list[Int[np.ndarray, "tokens moe_layers topk"]]:
        """Return each sequence's routed experts. Every rank calls it.

        Only the rank on which `stages` gathers has the experts of all layers.

        Args:
            first_slots: Slot (position in the key-value cache) of each sequence's first token.
            num_fed: Number of tokens of each sequence that were inputs of the model.
        """
        self._join()
        rows = np.concatenate(self._rows_of_slots)
        if len(self._own) == len(self._hooks.layers):
            routes = torch.cat(self._joined, 1)
        else:
            shape = (len(self._hooks.layers), len(rows), self._topk)
            routes = torch.full(shape, UNKNOWN, dtype=self._dtype, device=self._device)
            if self._joined:
                own = torch.tensor(self._own, dtype=torch.long, device=self._device)
                routes.index_copy_(0, own, torch.cat(self._joined, 1))
        self._joined.clear()
        stages.gather(routes.transpose(0, 1))
        sizes = [len(each) for each in self._rows_of_slots]
        position = np.repeat(np.arange(len(sizes)), sizes) - first_slots[rows]
        fed = np.flatnonzero((position >= 0) & (position < num_fed[rows]))
        # A stable sort keeps each sequence's tokens in the order of their positions.
        on_host = _in_order(routes.cpu().numpy(), fed[rows[fed].argsort(kind="stable")])
        ends = num_fed.cumsum().tolist()
        return [on_host[start:end] for start, end in pairwise((0, *ends))]


def _in_order(
    routes: Int[np.ndarray, "moe_layers captured topk"], order: Int[np.ndarray, " tokens"]
) -> Int[np.ndarray, "tokens moe_layers topk"]:
    """Return the routed experts of the tokens with the indices `order`, token by token.

    The routes are indexed as a numpy array whose items contain all experts of one (token, layer). This is several
    times as fast as indexing single experts, or as one torch operation for each of hundreds of short sequences.
    """
    layers, _, topk = routes.shape
    items = routes.view(np.dtype((np.void, topk * routes.itemsize)))[..., 0]
    return items.T[order].view(routes.dtype).reshape(len(order), layers, topk)


def routes_of_microbatch(
    microbatch: ModelMicrobatch,
    captured: Int[Tensor, "tokens moe_layers topk"],
    stages: StagesOfLayers,
    cut: SequenceCut,
) -> list[Int[np.ndarray, "tokens moe_layers topk"]]:
    """Return the routed experts of each sequence's tokens. Every rank calls it.

    Each sequence's last token is omitted, because an engine never feeds it to the model.
    """
    if cut.size > 1:
        blocks = [torch.empty_like(captured).view(torch.uint8) for _ in range(cut.size)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(blocks, captured.contiguous().view(torch.uint8), group=group)
        captured = torch.cat([block.view(torch.int16) for block in blocks])
    by_row = captured.unflatten(0, (-1, microbatch.input_ids.shape[0])).transpose(0, 1)
    by_row = microbatch.whole(microbatch.of_inputs(by_row)).contiguous()
    stages.gather(by_row)
    on_host = by_row.cpu().numpy()
    lengths, starts = microbatch.batch.lengths.tolist(), microbatch.sequence_start.tolist()
    if microbatch.packed_seq_params is None:
        return [on_host[row, : length - 1].copy() for row, length in enumerate(lengths)]
    return [on_host[0, start : start + length - 1].copy() for start, length in zip(starts, lengths, strict=True)]

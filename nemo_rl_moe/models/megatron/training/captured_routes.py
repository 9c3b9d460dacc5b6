# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed experts of whole passes, and their way from all pipeline stages to the rank that reports.

Of a batch while it is generated, by slot of its key-value cache; and of microbatches in a log-probability pass.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.training.microbatch import ModelMicrobatch
from nemo_rl_moe.models.megatron.training.router_taps import RouterTaps, SequenceCut
from nemo_rl_moe.moe.replay import UNKNOWN

# isort: split
from megatron.core import parallel_state


class StagesOfLayers:
    """The pipeline stage of each MoE layer, agreed on once by the ranks of each pipeline.

    Args:
        taps: Taps on this rank's routers.
        device: Where the ranks exchange tensors.
    """

    def __init__(self, taps: RouterTaps, device: torch.device):
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._rank = self._group.rank()
        own = [position for positions in taps.positions for position in positions]
        stages = torch.zeros(len(taps.layers), dtype=torch.long, device=device)
        stages[own] = self._rank
        if self._group.size() > 1:
            dist.all_reduce(stages, group=self._group)
        self._layers = [(stages == stage).nonzero()[:, 0].to(device) for stage in range(self._group.size())]
        # The ranks of one stage that share each layer have all seen the same tokens, or been told: one of them tells.
        self._tells = parallel_state.get_tensor_and_context_parallel_group().rank() == 0

    def gather(self, routes: Int[Tensor, "... moe_layers topk"]) -> None:
        """Fills in, on the last stage's reporting rank, the layers of all stages. Every rank calls it."""
        last = self._group.size() - 1
        if last == 0 or not self._tells:
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


_MOST_PASSES_KEPT = 16


class CapturedRoutes:
    """Routed experts of the tokens of one batch, by slot of the key-value cache.

    What some passes over the same sequences have chosen is brought together at once: a pass over one token of each is
    short.

    Args:
        taps: Taps on this rank's routers, under `shown`.
        num_slots: Slots of the batch.
        num_rows: Sequences at its start.
        topk: Experts of each token.
        device: Where the routers run.
    """

    def __init__(self, taps: RouterTaps, num_slots: int, num_rows: int, topk: int, device: torch.device):
        self._taps, self._topk = taps, topk
        self._own = sorted(position for positions in taps.positions for position in positions)
        self._device = device
        shape = (len(self._own), num_slots, num_rows, topk)
        self._routes = torch.full(shape, UNKNOWN, dtype=torch.int16, device=device)
        self._kept: list[list[Int[Tensor, "tokens topk"]]] = []
        self._first_slot = self._end_slot = 0
        self._rows: Int[Tensor, " rows"] | None = None
        taps.take()

    def add(self, first_slot: int, end_slot: int, rows: Int[Tensor, " rows"]) -> None:
        """Takes what the last forward pass has chosen.

        Args:
            first_slot: Of the tokens that went through it.
            end_slot: Behind them.
            rows: Which sequences of the start the batch still has.
        """
        taken = self._taps.take()
        if not taken:  # a stage without MoE layers
            return
        if rows is not self._rows or len(self._kept) == _MOST_PASSES_KEPT:
            self._bring_together()
            self._first_slot, self._rows = first_slot, rows
        # Of a layer that runs twice the second pass is one over the last column alone.
        self._kept.append([taken[position][0].taken for position in self._own])
        self._end_slot = end_slot

    def _bring_together(self) -> None:
        if not self._kept or self._rows is None:
            return
        chosen = torch.cat([taken for of_layer in zip(*self._kept, strict=True) for taken in of_layer]).to(torch.int16)
        in_slots = chosen.view(len(self._own), self._end_slot - self._first_slot, len(self._rows), self._topk)
        self._routes[:, self._first_slot : self._end_slot].index_copy_(2, self._rows, in_slots)
        self._kept.clear()

    def sequences(
        self, stages: StagesOfLayers, first_slots: Sequence[int], num_fed: Sequence[int]
    ) -> list[Int[np.ndarray, "tokens moe_layers topk"]]:
        """Routes of each sequence, of all layers on the rank that reports. Every rank calls it.

        Args:
            stages: Of the layers.
            first_slots: Slot of each sequence's first token.
            num_fed: Tokens of each that were fed to the model: all but the last one.
        """
        self._bring_together()
        routes = self._routes.permute(2, 1, 0, 3)
        if len(self._own) < len(self._taps.layers):
            rows, slots, _, topk = routes.shape
            routes = self._routes.new_full((rows, slots, len(self._taps.layers), topk), UNKNOWN)
            own = torch.tensor(self._own, dtype=torch.long, device=self._device)
            routes.index_copy_(2, own, self._routes.permute(2, 1, 0, 3))
        stages.gather(routes)
        # By numpy: a tensor for each of hundreds of short sequences takes longer than the copying.
        on_host = routes.contiguous().cpu().numpy()
        return [
            on_host[row, first : first + count].copy()
            for row, (first, count) in enumerate(zip(first_slots, num_fed, strict=True))
        ]


def routes_of_microbatch(
    microbatch: ModelMicrobatch,
    captured: Int[Tensor, "tokens moe_layers topk"],
    stages: StagesOfLayers,
    cut: SequenceCut,
) -> list[Int[np.ndarray, "tokens moe_layers topk"]]:
    """Routes of the tokens of each sequence of a microbatch but its last one, which no engine feeds to its model.

    Of all layers and tokens on the rank that reports. Every rank calls it.

    Args:
        microbatch: What ran.
        captured: What this rank's routers chose, in their order; -1 in layers of other stages.
        stages: Of the layers.
        cut: This rank's block of columns, under sequence parallelism.
    """
    if cut.size > 1:
        blocks = [torch.empty_like(captured).view(torch.uint8) for _ in range(cut.size)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(blocks, captured.contiguous().view(torch.uint8), group=group)
        captured = torch.cat([block.view(torch.int16) for block in blocks])
    by_row = microbatch.whole(captured.unflatten(0, (-1, microbatch.input_ids.shape[0])).transpose(0, 1)).contiguous()
    stages.gather(by_row)
    on_host = by_row.cpu().numpy()
    lengths, starts = microbatch.batch.lengths.tolist(), microbatch.sequence_start.tolist()
    if microbatch.packed_seq_params is None:
        return [on_host[row, : length - 1].copy() for row, length in enumerate(lengths)]
    return [on_host[0, start : start + length - 1].copy() for start, length in zip(starts, lengths, strict=True)]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Overload of one rank's share of a step: what ranks that exchange tokens can work out among themselves.

Counts of microbatches, layers and experts stay where they are needed: they are added up over the ranks of one
expert-data-parallel slice and pipeline stage, which then share the events out among themselves. What is left, sums and
maxima of sizes and layers, is reduced over the whole job, in bytes that depend neither on slices nor on microbatches.
"""

from collections.abc import Sequence
from math import ceil, lcm

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.model.transformer_config import moe_layer_indices, moe_positions_of_chunks
from nemo_rl_moe.routing.metrics.expert_load_recorder import ExpertLoadRecorder
from nemo_rl_moe.routing.metrics.overload_factor import (
    OverloadSums,
    StageEvents,
    check_split,
    cumulative_peak_ratios,
    numbers_on,
    overload_sums,
    rank_loads,
)


def overload_of_rank(
    recorder: ExpertLoadRecorder, config: TransformerConfig, what_if_sizes: Sequence[int]
) -> tuple[OverloadSums, Float[Tensor, ""]]:
    """Return the overload of this rank's share of the events, for the size that ran and for others.

    Every rank calls it. Collectives: a sum over the slice where it has several ranks; for sizes above the one that ran,
    an exchange among the slices where there are several. Neither waits for the host.
    """
    chunks = moe_positions_of_chunks(config, parallel_state.get_pipeline_model_parallel_rank())
    held = [position for layers in chunks for position in layers]
    num_layers, size = len(moe_layer_indices(config)), config.expert_model_parallel_size
    sizes = [size, *what_if_sizes]
    for each in sizes:
        check_split(recorder.counts.shape[-1], each)
    counts = _counts_of_slice(recorder, held, num_blocks=lcm(*sizes))
    # Positions among the layers that this stage holds.
    of_chunks = [[held.index(position) for position in layers] for layers in chunks]
    events = recorder.events if held else []
    peak = cumulative_peak_ratios(rank_loads(counts[None], size), StageEvents(events, of_chunks)).amax()
    shared, numbers = _share(counts.flatten(0, 1), exchange=max(sizes) > size)
    if held != list(range(num_layers)):  # to their places among the layers of the whole model
        num_held = max(len(held), 1)  # a stage may hold none, and have no events
        numbers = numbers // num_held * num_layers + _on(held, counts)[numbers % num_held]
    return overload_sums(shared, numbers, (len(counts), num_layers), sizes, size), peak


def _on(held: Sequence[int], counts: Tensor) -> Int[Tensor, " held"]:
    return numbers_on(counts.device, tuple(held))


def _counts_of_slice(
    recorder: ExpertLoadRecorder, held: Sequence[int], *, num_blocks: int
) -> Int[Tensor, "microbatches held blocks"]:
    """Sum the assignments of the ranks that exchange tokens over blocks of experts that all sizes keep whole."""
    own = recorder.counts.index_select(1, _on(held, recorder.counts))
    # More tokens than int32 can count go through no microbatch.
    blocks: Tensor = rank_loads(own, num_blocks).to(torch.int32).contiguous()
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    if held and dist.get_world_size(group) > 1:
        dist.all_reduce(blocks, group=group)
    return blocks


def _share(
    counts: Int[Tensor, "events blocks"], *, exchange: bool
) -> tuple[Int[Tensor, "slices share blocks"], Int[Tensor, " share"]]:
    """Return this rank's share of the events, and their numbers; of all slices after an exchange."""
    # Ranks of a slice take events in turn; after an exchange so do the slices. The shares are equally long: some end
    # with events past the last one, of which nothing is routed.
    rank = parallel_state.get_expert_tensor_and_model_parallel_rank()
    num_ranks = parallel_state.get_expert_tensor_and_model_parallel_world_size()
    num_slices = parallel_state.get_expert_data_parallel_world_size() if exchange else 1
    num_events, num_blocks = counts.shape
    share = ceil(num_events / (num_ranks * num_slices))
    if num_ranks * num_slices == 1:
        return counts[None], torch.arange(num_events, device=counts.device)
    # [slices, share]: what each slice is to look at, of this rank's part.
    places = rank + num_ranks * torch.arange(share * num_slices, device=counts.device).view(share, num_slices).T
    padded = torch.cat([counts, counts.new_zeros(1, num_blocks)])
    # Indices that are transposed give what is transposed in memory.
    mine = padded[places.clamp(max=num_events)].contiguous()
    if num_slices == 1 or not num_events:
        return mine, places[0]
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine, group=parallel_state.get_expert_data_parallel_group())
    return received, places[parallel_state.get_expert_data_parallel_rank()]

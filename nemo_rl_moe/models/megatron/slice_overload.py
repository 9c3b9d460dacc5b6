# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Overload of one rank's share of a step, computed in the group of ranks that exchange tokens.

A slice is one expert-data-parallel replica of a pipeline stage. Its ranks sum their counts by microbatch, layer and
expert, and then divide the events among themselves. An event is one layer in one microbatch. Only sums and maxima by
expert-parallel size and layer are reduced over all ranks. Their size does not depend on the number of slices and
microbatches.
"""

from collections.abc import Sequence
from math import ceil, lcm

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.model.stages import moe_positions_of_chunks
from nemo_rl_moe.routing.metrics.expert_load_recorder import ExpertLoadRecorder
from nemo_rl_moe.routing.metrics.overload_factor import (
    OverloadSums,
    StageEvents,
    assignments_over_capacity,
    check_split,
    cumulative_peak_ratios,
    numbers_on,
    overload_sums,
    rank_loads,
)
from nemo_rl_moe.routing.routers import moe_layer_indices


def overload_of_rank(
    recorder: ExpertLoadRecorder, config: TransformerConfig, what_if_sizes: Sequence[int]
) -> tuple[OverloadSums, Float[Tensor, ""], Int[Tensor, " 2"]]:
    """Return this rank's part of the sums of a step's overload, the ranks' highest peak of held assignments, and this
    rank's part of the `assignments_over_capacity`.

    The overload is that of the run's expert-parallel size and of the sizes `what_if_sizes`. The peak is relative to
    balanced loads (`cumulative_peak_ratios`). Without a capacity, no assignment exceeds it. Every rank calls it.

    The ranks that exchange tokens sum their counts, and divide the (microbatch, layer) pairs among themselves. For
    sizes above the run's, these groups of ranks exchange counts too. Neither collective makes the host wait for the
    GPU.
    """
    chunks = moe_positions_of_chunks(config, parallel_state.get_pipeline_model_parallel_rank())
    held = [position for layers in chunks for position in layers]
    num_layers, size = len(moe_layer_indices(config)), config.expert_model_parallel_size
    sizes = [size, *what_if_sizes]
    for each in sizes:
        check_split(recorder.counts.shape[-1], each)
    counts = _counts_of_slice(recorder, held, num_blocks=lcm(*sizes))
    # Indices into the layers of this stage.
    of_chunks = [[held.index(position) for position in layers] for layers in chunks]
    events = recorder.events if held else []
    peak = cumulative_peak_ratios(rank_loads(counts[None], size), StageEvents(events, of_chunks)).amax()
    shared, numbers = _share(counts.flatten(0, 1), exchange=max(sizes) > size)
    over = assignments_over_capacity(rank_loads(shared, size), rank_capacity_factor(config) or config.num_moe_experts)
    if held != list(range(num_layers)):  # to indices into the layers of the model
        num_held = max(len(held), 1)  # a stage without layers has no events
        numbers = numbers // num_held * num_layers + _on(held, counts)[numbers % num_held]
    return overload_sums(shared, numbers, (len(counts), num_layers), sizes, size), peak, over


def rank_capacity_factor(config: TransformerConfig) -> float | None:
    """Return the capacity of an expert-parallel rank over its mean load, or None. Older releases have no capacity."""
    return getattr(config, "moe_expert_rank_capacity_factor", None)


def _on(held: Sequence[int], counts: Tensor) -> Int[Tensor, " held"]:
    return numbers_on(counts.device, tuple(held))


def _counts_of_slice(
    recorder: ExpertLoadRecorder, held: Sequence[int], *, num_blocks: int
) -> Int[Tensor, "microbatches held blocks"]:
    """Return the number of assignments to each block of consecutive experts, summed over a slice.

    A slice is a group of ranks that exchange tokens. Blocks are so small that no expert-parallel size splits a block.

    Args:
        held: Indices of this stage's layers among the model's MoE layers.
    """
    own = recorder.counts.index_select(1, _on(held, recorder.counts))
    # int32 can count the tokens of any microbatch.
    blocks: Tensor = rank_loads(own, num_blocks).to(torch.int32).contiguous()
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    if held and dist.get_world_size(group) > 1:
        dist.all_reduce(blocks, group=group)
    return blocks


def _share(
    counts: Int[Tensor, "events blocks"], *, exchange: bool
) -> tuple[Int[Tensor, "slices share blocks"], Int[Tensor, " share"]]:
    """Return the counts of the events that this rank evaluates, and the indices of these events.

    An event is a (microbatch, layer) pair, and a slice is a group of ranks that exchange tokens. With `exchange`, the
    counts are those of all slices. Otherwise they are those of this rank's slice.
    """
    # Ranks of a slice take events in turn, and so do slices after an exchange. All shares have the same length: some
    # are padded with empty events after the last event.
    rank = parallel_state.get_expert_tensor_and_model_parallel_rank()
    num_ranks = parallel_state.get_expert_tensor_and_model_parallel_world_size()
    num_slices = parallel_state.get_expert_data_parallel_world_size() if exchange else 1
    num_events, num_blocks = counts.shape
    share = ceil(num_events / (num_ranks * num_slices))
    if num_ranks * num_slices == 1:
        return counts[None], torch.arange(num_events, device=counts.device)
    # [slices, share]: the events of each slice from this rank's part.
    events = rank + num_ranks * torch.arange(share * num_slices, device=counts.device).view(share, num_slices).T
    padded = torch.cat([counts, counts.new_zeros(1, num_blocks)])
    # Transposed indices give a result that is transposed in memory.
    mine = padded[events.clamp(max=num_events)].contiguous()
    if num_slices == 1 or not num_events:
        return mine, events[0]
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine, group=parallel_state.get_expert_data_parallel_group())
    return received, events[parallel_state.get_expert_data_parallel_rank()]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Brings each Hugging Face tensor together on one rank, one at a time, from the ranks that hold pieces of it.

All ranks of a pipeline stage make the same plan out of names and sizes. Every tensor goes to the rank that has the
least to write so far; data-parallel replicas hold the same weights, and share the work.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.models.megatron.families.rules import Rule
from nemo_rl_moe.models.megatron.hf_sources import rule_of, source_parts
from nemo_rl_moe.models.megatron.parameter_layout import ParameterPiece, parameter_pieces
from nemo_rl_moe.models.safetensors_writer import TensorHeader

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Delivery:
    """One Hugging Face tensor, and how it comes to the rank that writes it.

    Attributes:
        header: Its name, shape and type.
        items: This rank's pieces of the parameters that it is part of, with their rules: one, or of a tensor that
            holds all experts those of this rank's experts, in order.
        is_stacked: It holds all experts.
        takes_part: This rank's replica of the weights is the one that it is taken from.
        shard: Tensor-parallel rank (for experts: expert-tensor-parallel) that it comes to.
        owner: Of a stacked one, the expert-parallel rank that it comes to.
    """

    header: TensorHeader
    items: tuple[tuple[ParameterPiece, Rule], ...]
    is_stacked: bool
    takes_part: bool
    shard: int
    owner: int

    @property
    def is_mine(self) -> bool:
        """Whether it comes to this rank."""
        shard_rank, _ = _shards(self.items[0][0].is_expert)
        is_owner = not self.is_stacked or self.owner == parallel_state.get_expert_model_parallel_rank()
        return self.takes_part and shard_rank == self.shard and is_owner


class _Spread:
    """Gives each tensor to the place that has the fewest bytes so far."""

    def __init__(self, *sizes: int):
        self._sizes, self._bytes = sizes, [0] * math.prod(sizes)

    def place(self, num_bytes: int) -> list[int]:
        """Coordinates of the place, one for each size."""
        index = self._bytes.index(min(self._bytes))
        self._bytes[index] += num_bytes
        coordinates: list[int] = []
        for size in reversed(self._sizes):
            index, coordinate = divmod(index, size)
            coordinates.insert(0, coordinate)
        return coordinates


def _shards(is_expert: bool) -> tuple[int, int]:
    """This rank's place among those that share a parameter, and their number."""
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _replicas(is_expert: bool) -> tuple[int, int]:
    """Which copy of a parameter this rank has a share in, and how many copies there are."""
    if is_expert:
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def plan_deliveries(
    chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any
) -> tuple[list[Delivery], list[str]]:
    """What tensors this rank has a part in, in the order in which all ranks bring them together.

    Returns:
        The deliveries; and the parameters that the family has no tensor for.
    """
    items: dict[str, list[tuple[ParameterPiece, Rule]]] = {}
    headers: dict[str, tuple[TensorHeader, bool]] = {}
    without_rule = []
    for piece in parameter_pieces(chunks, config):
        rule = rule_of(piece, hf_config)
        if rule is None:
            without_rule.append(piece.name)
            continue
        if hf_config.tie_word_embeddings and piece.name == "output_layer.weight":
            continue
        parts = source_parts(piece, rule, rule.sources, hf_config, config.num_moe_experts)
        for part in {part.source.name: part for part in parts}.values():
            name = part.source.name
            items.setdefault(name, []).append((piece, rule))
            headers[name] = TensorHeader(name, part.shape, piece.local.dtype), part.source.is_stacked
    # In a file the larger types come first.
    names = sorted(items, key=lambda name: -headers[name][0].dtype.itemsize)
    by_expert = {name: tuple(sorted(items[name], key=lambda item: item[1].expert or 0)) for name in names}
    return _assigned([(*headers[name], by_expert[name]) for name in names]), without_rule


def _assigned(
    tensors: Sequence[tuple[TensorHeader, bool, tuple[tuple[ParameterPiece, Rule], ...]]],
) -> list[Delivery]:
    """Chooses who writes what; with the same outcome on all ranks that have a part in a tensor."""
    (_, experts_copies), (_, expert_shards) = _replicas(True), _shards(True)
    (_, copies), (_, shards) = _replicas(False), _shards(False)
    stacked = _Spread(experts_copies, parallel_state.get_expert_model_parallel_world_size(), expert_shards)
    single, dense = _Spread(experts_copies, 1, expert_shards), _Spread(copies, 1, shards)
    deliveries = []
    for header, is_stacked, items in tensors:
        is_expert = items[0][0].is_expert
        spread = (stacked if is_stacked else single) if is_expert else dense
        replica, owner, shard = spread.place(header.num_bytes)
        deliveries.append(Delivery(header, items, is_stacked, replica == _replicas(is_expert)[0], shard, owner))
    return deliveries


def bring_together(delivery: Delivery, hf_config: Any) -> Iterator[Tensor]:
    """Yields the tensor on the host of the rank that it comes to, a stacked one expert by expert; elsewhere nothing.

    Every rank runs through all deliveries, in order, and through each of them to its end.
    """
    if not delivery.takes_part:
        return
    if not delivery.is_stacked:
        ((piece, rule),) = delivery.items
        entry = _gathered(delivery, piece, rule, hf_config)
        if entry is not None:
            yield entry.cpu()
        return
    group, rank = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_model_parallel_rank()
    for expert in range(delivery.header.shape[0]):
        holder, index = divmod(expert, len(delivery.items))
        entry = _gathered(delivery, *delivery.items[index], hf_config) if holder == rank else None
        if delivery.is_mine:
            yield (_received(delivery, holder, group) if entry is None else entry).cpu()
        elif entry is not None:
            dist.send(_as_bytes(entry), dist.get_global_rank(group, delivery.owner), group=group)


def _received(delivery: Delivery, holder: int, group: Any) -> Tensor:
    """The next expert of a stacked tensor, from the rank that holds it."""
    like = delivery.items[0][0].local
    entry = torch.empty(delivery.header.shape[1:], dtype=delivery.header.dtype, device=like.device)
    dist.recv(_as_bytes(entry), dist.get_global_rank(group, holder), group=group)
    return entry


def _gathered(delivery: Delivery, piece: ParameterPiece, rule: Rule, hf_config: Any) -> Tensor | None:
    """What a parameter has of a tensor, as it stands in its file, on the rank of the group that it comes to."""
    parts = zip(rule.sources, rule.layout.split(piece.local, len(rule.sources), hf_config), strict=True)
    mine = [(source, part) for source, part in parts if source.name == delivery.header.name]
    mine.sort(key=lambda of_source: of_source[0].half or 0)
    gathered = [_all_shards(piece, part, delivery.shard) for _, part in mine]
    whole = [part for part in gathered if part is not None]
    if not whole:
        return None
    entry = torch.cat(whole) if len(whole) > 1 else whole[0]
    if piece.is_vocabulary:
        entry = entry[: hf_config.vocab_size]
    return entry.transpose(0, 1) if mine[0][0].is_transposed else entry


def _all_shards(piece: ParameterPiece, part: Tensor, shard: int) -> Tensor | None:
    """A part that is cut for tensor parallelism, whole, on one rank of its group."""
    rank, _ = _shards(piece.is_expert)
    if piece.shard_dimension is None or piece.num_shards == 1:
        return part if rank == shard else None
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if piece.is_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    shards = (
        torch.empty((piece.num_shards, *part.shape), dtype=part.dtype, device=part.device) if rank == shard else None
    )
    into = None if shards is None else [_as_bytes(one) for one in shards]
    dist.gather(_as_bytes(part), into, dst=dist.get_global_rank(group, shard), group=group)
    if shards is None:
        return None
    # Along the rows the shards lie one behind another already.
    return shards.flatten(0, 1) if piece.shard_dimension == 0 else torch.cat(list(shards), piece.shard_dimension)


def _as_bytes(tensor: Tensor) -> Tensor:
    """For collectives, which do not know every type; a view where the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)

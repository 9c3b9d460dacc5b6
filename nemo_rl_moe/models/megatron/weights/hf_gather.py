# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gathering of Hugging Face tensors, one at a time, from the ranks with their pieces to the rank that writes them.

All ranks of a pipeline stage make the same plan from names and sizes. Each tensor goes to the rank that has the fewest
bytes so far. Data-parallel replicas hold the same weights, and share the work.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.families.rules import Rule
from nemo_rl_moe.models.families.rules import rule as tensor_rule
from nemo_rl_moe.models.megatron.model.agreement import SharedFailure
from nemo_rl_moe.models.megatron.weights.hf_sources import OUTPUT_LAYER, copies_of, source_parts, written_rule_of
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece, parameter_pieces
from nemo_rl_moe.models.safetensors_files import TensorHeader


@dataclass(frozen=True)
class Delivery:
    """A Hugging Face tensor, and the rank that gathers it.

    Attributes:
        items: This rank's pieces of the tensor's parameters, with their rules. A stacked tensor has a piece for each
            local expert.
        is_stacked: Whether the tensor holds all experts of a layer.
        takes_part: Whether the tensor is gathered from this rank's replica of the weights.
        shard: Tensor-parallel rank that gathers the tensor. For experts, the expert-tensor-parallel rank.
        owner: Expert-parallel rank that gathers the tensor, if it is stacked.
    """

    header: TensorHeader
    items: tuple[tuple[ParameterPiece, Rule], ...]
    is_stacked: bool
    takes_part: bool
    shard: int
    owner: int

    @property
    def is_mine(self) -> bool:
        shard_rank, _ = _shards(self.items[0][0].is_expert)
        is_owner = not self.is_stacked or self.owner == parallel_state.get_expert_model_parallel_rank()
        return self.takes_part and shard_rank == self.shard and is_owner


class _Spread:
    """Greedy balance of bytes over a grid of ranks. A rank has a coordinate for each of the grid's sizes."""

    def __init__(self, *sizes: int):
        self._bytes: dict[tuple[int, ...], int] = dict.fromkeys(itertools.product(*map(range, sizes)), 0)

    def assign(self, num_bytes: int) -> tuple[int, ...]:
        """Assign `num_bytes` to the first rank with the fewest bytes, and return the rank's coordinates."""
        coordinates = min(self._bytes, key=self._bytes.__getitem__)
        self._bytes[coordinates] += num_bytes
        return coordinates


def _shards(is_expert: bool) -> tuple[int, int]:
    """Return this rank's index among the ranks that share a parameter, and the number of these ranks."""
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _replicas(is_expert: bool) -> tuple[int, int]:
    """Return the index of this rank's replica of a parameter, and the number of replicas."""
    if is_expert:
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def plan_deliveries(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> tuple[list[Delivery], list[str]]:
    """Return the tensors of which this rank has a part, in the order of gathering, and the parameters without a rule.

    Every tensor-parallel rank calls it.

    Args:
        is_wanted: Function of a name: whether to gather the tensor. The answer must be the same on all ranks.
    """
    items: dict[str, list[tuple[ParameterPiece, Rule]]] = {}
    headers: dict[str, tuple[TensorHeader, bool]] = {}
    without_rule = []
    is_classifier = any(chunk.is_classifier for chunk in chunks)
    copies = copies_of(chunks, hf_config)
    pieces = list(parameter_pieces(chunks, config))
    narrow_types = _narrow_types(pieces)
    for piece in pieces:
        rule = written_rule_of(piece, hf_config, is_classifier=is_classifier)
        if rule is None:
            without_rule.append(piece.name)
            continue
        if piece.name == OUTPUT_LAYER and (is_classifier or hf_config.tie_word_embeddings):
            continue
        for each in (rule, *map(tensor_rule, copies.get(piece.name, ()))):
            parts = source_parts(piece, each, each.sources, hf_config, config.num_moe_experts)
            for part in {part.source.name: part for part in parts}.values():
                name = part.source.name
                items.setdefault(name, []).append((piece, each))
                dtype = narrow_types.get(piece.name, piece.local.dtype)
                headers[name] = TensorHeader(name, part.shape, dtype), part.source.is_stacked
    # Files begin with the larger types.
    names = sorted(filter(is_wanted, items), key=lambda name: -headers[name][0].dtype.itemsize)
    by_expert = {name: tuple(sorted(items[name], key=lambda item: item[1].expert or 0)) for name in names}
    return _assigned([(*headers[name], by_expert[name]) for name in names]), without_rule


def _narrow_types(pieces: Sequence[ParameterPiece]) -> dict[str, torch.dtype]:
    """Return name -> `narrower_type` of the parameters that it represents exactly on all tensor-parallel ranks."""
    found = [(piece, piece.narrower_type) for piece in pieces if piece.narrower_type is not None]
    if not found:
        return {}
    are_exact = torch.stack([(piece.local.to(narrow) == piece.local).all() for piece, narrow in found]).int()
    # Ranks gather in the order of the types.
    dist.all_reduce(are_exact, dist.ReduceOp.MIN, group=parallel_state.get_tensor_model_parallel_group())
    return {piece.name: narrow for (piece, narrow), is_exact in zip(found, are_exact.tolist(), strict=True) if is_exact}


def _assigned(tensors: Sequence[tuple[TensorHeader, bool, tuple[tuple[ParameterPiece, Rule], ...]]]) -> list[Delivery]:
    """Return each tensor with the rank that gathers it. All ranks that have a part of a tensor choose the same rank."""
    (_, experts_copies), (_, expert_shards) = _replicas(True), _shards(True)
    (_, copies), (_, shards) = _replicas(False), _shards(False)
    stacked = _Spread(experts_copies, parallel_state.get_expert_model_parallel_world_size(), expert_shards)
    single, dense = _Spread(experts_copies, 1, expert_shards), _Spread(copies, 1, shards)
    deliveries = []
    for header, is_stacked, items in tensors:
        is_expert = items[0][0].is_expert
        spread = (stacked if is_stacked else single) if is_expert else dense
        replica, owner, shard = spread.assign(header.num_bytes)
        deliveries.append(Delivery(header, items, is_stacked, replica == _replicas(is_expert)[0], shard, owner))
    return deliveries


def gather_tensors(delivery: Delivery, hf_config: Any, failure: SharedFailure) -> Iterator[Tensor]:
    """Yield the tensor, or each expert of a stacked tensor, on the gathering rank's device, and nothing on other ranks.

    A yielded tensor may be a view of a parameter. Every rank must exhaust the iterators of all deliveries in order.
    """
    if not delivery.takes_part:
        return
    if not delivery.is_stacked:
        ((piece, rule),) = delivery.items
        entry = _gathered(delivery, piece, rule, hf_config, failure)
        if entry is not None:
            yield entry
        return
    rank = parallel_state.get_expert_model_parallel_rank()
    for expert in range(delivery.header.shape[0]):
        holder, index = divmod(expert, len(delivery.items))
        entry = _gathered(delivery, *delivery.items[index], hf_config, failure) if holder == rank else None
        if holder != delivery.owner:
            entry = _handed_over(delivery, holder, entry, failure)
        if entry is not None:
            yield entry


def _handed_over(delivery: Delivery, holder: int, entry: Tensor | None, failure: SharedFailure) -> Tensor | None:
    """Send the next expert of a stacked tensor from its holder to the gathering rank. Return it there, else None."""
    group, like = parallel_state.get_expert_model_parallel_group(), delivery.items[0][0].local
    shard_rank, _ = _shards(is_expert=True)
    if shard_rank != delivery.shard:
        return None
    message = None
    with failure.caught():
        if delivery.is_mine and not failure.has_failed:
            entry = torch.empty(delivery.header.shape[1:], dtype=delivery.header.dtype, device=like.device)
        message = None if entry is None else _as_bytes(entry)
    if not failure.none_failed(group, like.device) or message is None:
        return None
    if delivery.is_mine:
        dist.recv(message, dist.get_global_rank(group, holder), group=group)
        return entry
    dist.send(message, dist.get_global_rank(group, delivery.owner), group=group)
    return None


def _gathered(
    delivery: Delivery, piece: ParameterPiece, rule: Rule, hf_config: Any, failure: SharedFailure
) -> Tensor | None:
    """Return a parameter's part of a tensor, in file order, on the gathering rank, and None on other ranks."""
    rank, _ = _shards(piece.is_expert)
    is_cut = piece.shard_dimension is not None and piece.num_shards > 1
    if is_cut and failure.has_failed:
        failure.none_failed(_shard_group(piece.is_expert), piece.local.device)
    if failure.has_failed or (not is_cut and rank != delivery.shard):
        return None
    parts: list[Tensor] = []
    shards: list[Tensor] = []
    with failure.caught():
        of_sources = zip(rule.sources, rule.layout.split(piece.merged(), len(rule.sources), hf_config), strict=True)
        mine = [(source, part) for source, part in of_sources if source.name == delivery.header.name]
        parts = [part.contiguous() if is_cut else part for _, part in mine]
        if is_cut and rank == delivery.shard:
            shards = [part.new_empty((piece.num_shards, *part.shape)) for part in parts]
    if is_cut:
        if not failure.none_failed(_shard_group(piece.is_expert), piece.local.device):
            return None
        for number, part in enumerate(parts):
            _gather(piece.is_expert, part, shards[number] if shards else None, delivery.shard)
    if failure.has_failed or rank != delivery.shard:
        return None
    entry: Tensor | None = None
    with failure.caught():
        full = [_joined(piece, shard) for shard in shards] if is_cut else parts
        entry = torch.cat(full) if len(full) > 1 else full[0]
        if piece.is_vocabulary:
            entry = entry[: hf_config.vocab_size]
        entry = entry.transpose(0, 1) if mine[0][0].is_transposed else entry
        entry = entry.to(delivery.header.dtype)  # a view, unless files have a narrower type
    return None if failure.has_failed else entry


def _shard_group(is_expert: bool) -> Any:
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _gather(is_expert: bool, part: Tensor, shards: Tensor | None, shard: int) -> None:
    """Gather contiguous parts from all ranks that share a parameter, into the memory of one of these ranks."""
    group = _shard_group(is_expert)
    into = None if shards is None else [_as_bytes(one) for one in shards]
    dist.gather(_as_bytes(part), into, dst=dist.get_global_rank(group, shard), group=group)


def _joined(piece: ParameterPiece, shards: Tensor) -> Tensor:
    # Shards of rows are consecutive in memory.
    return shards.flatten(0, 1) if piece.shard_dimension == 0 else torch.cat(list(shards), piece.shard_dimension or 0)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as bytes, because collectives do not know every type."""
    return tensor.contiguous().view(-1).view(torch.uint8)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights from a stream of full Hugging Face tensors. A rank copies its slices into its parameters as they arrive."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.models.families.rules import Rule
from nemo_rl_moe.models.megatron.weights.hf_sources import SourcePart, rule_of, source_parts
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece, parameter_pieces
from nemo_rl_moe.models.safetensors_folder import listed
from nemo_rl_moe.weight_sync.transport import NamedTensor


@torch.no_grad()
def load_tensors(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    tensors: Iterable[NamedTensor],
    *,
    keeps_others: bool = False,
) -> None:
    """Fill every parameter of this rank.

    Args:
        tensors: Names and full tensors from a trainer, each once, in any order. A tensor is valid until the next
            tensor arrives.
        keeps_others: Whether a parameter of which no part arrives keeps its values. If False, it is an error.

    Raises:
        WeightSyncError: A tensor is missing or has another shape. The weights are then a mixture of old and new.
    """
    awaited = _awaited(chunks, config, hf_config)
    for name, tensor in tensors:
        for filling, number in awaited.pop(name, ()):  # tensors of other ranks are ignored
            filling.take(number, tensor, hf_config)
        del tensor  # the next one may be in another bucket, and the sender waits for the memory of this one
    missing = {
        name: fillings
        for name, fillings in awaited.items()
        if not keeps_others or any(filling.arrived for filling, _ in fillings)
    }
    if missing:
        raise WeightSyncError(f"{len(missing)} tensors have not arrived: {listed(sorted(missing))}")


@dataclass
class _Filling:
    """A piece of a parameter that is filled when all of its parts have arrived.

    Attributes:
        arrived: Index of a part among the piece's parts -> the part.
    """

    piece: ParameterPiece
    rule: Rule
    parts: Sequence[SourcePart]
    arrived: dict[int, Tensor] = field(default_factory=dict)

    def take(self, number: int, tensor: Tensor, hf_config: Any) -> None:
        part = self.parts[number]
        if tuple(tensor.shape) != part.shape:
            raise WeightSyncError(f"{part.source.name} has the shape {list(tensor.shape)}, expected {list(part.shape)}")
        own = tensor.new_zeros(part.local_shape)  # padding stays zero
        part.in_file_order(own).copy_(tensor[tuple(slice(*ends) for ends in part.ranges)])
        self.arrived[number] = own
        if len(self.arrived) == len(self.parts):
            in_order = [self.arrived[each] for each in range(len(self.parts))]
            self.piece.local.copy_(self.rule.layout.join(in_order, hf_config))
            self.arrived.clear()


def _awaited(
    chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any
) -> dict[str, list[tuple[_Filling, int]]]:
    """Return name of a tensor that this rank needs -> the pieces that need it, each with the number of the part."""
    awaited: dict[str, list[tuple[_Filling, int]]] = defaultdict(list)
    for piece in parameter_pieces(chunks, config):
        rule = rule_of(piece, hf_config)
        if rule is None:
            raise WeightSyncError(f"no Hugging Face tensor of {hf_config.model_type} is known for {piece.name}")
        filling = _Filling(piece, rule, source_parts(piece, rule, rule.sources, hf_config, config.num_moe_experts))
        for number, part in enumerate(filling.parts):
            awaited[part.source.name].append((filling, number))
    return awaited

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of Hugging Face tensors that form a rank's piece of a parameter: shapes and index ranges without data."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.rules import MTP_PREFIX, Rule, Source
from nemo_rl_moe.models.families.rules import rule as tensor_rule
from nemo_rl_moe.models.megatron.model.value_head import PREFIX as VALUE_HEAD_PREFIX
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece

OUTPUT_LAYER = "output_layer.weight"
CLASSIFIER_HEAD = tensor_rule("score.weight")
"""The head of transformers' `ForSequenceClassification` with one label, which is a value head."""


@dataclass(frozen=True)
class SourcePart:
    """Slice of a Hugging Face tensor that a rank's piece of a parameter needs.

    Attributes:
        shape: Shape of the full tensor.
        ranges: Begin and end of the slice in each dimension.
        local_shape: Shape of the slice in the piece, including padding of the vocabulary.
    """

    source: Source
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    local_shape: tuple[int, ...]

    def in_file_order(self, part: Tensor) -> Tensor:
        """Return a view of a part with `local_shape` in the layout of the file, without padding."""
        if self.source.is_transposed:
            part = part.transpose(0, 1)
        if self.source.is_stacked:
            part = part.unsqueeze(0)
        # Only the vocabulary has padding, after its rows.
        return part[tuple(slice(stop - start) for start, stop in self.ranges)]


def rule_of(piece: ParameterPiece, hf_config: Any) -> Rule | None:
    """Return the rule of a parameter: its Hugging Face tensors. None if the model's family has no tensor for it."""
    family = family_of(hf_config)
    if piece.name.startswith(MTP_PREFIX):
        mtp = family.mtp_layers
        return None if mtp is None else mtp.find(piece.name, family.rules, hf_config)
    tied = piece.name == OUTPUT_LAYER and hf_config.tie_word_embeddings
    return family.rules.find("embedding.word_embeddings.weight" if tied else piece.name)


def copies_of(chunks: Sequence[GPTModel], hf_config: Any) -> Mapping[str, Sequence[str]]:
    """Return canonical name of a parameter -> names of its copies in files, for trained multi-token prediction."""
    mtp = family_of(hf_config).mtp_layers
    if mtp is None or not any(chunk.trains_mtp for chunk in chunks):
        return {}
    return mtp.copies_in(hf_config)


def is_of_main_model(name: str, hf_config: Any) -> bool:
    """Return whether a Hugging Face tensor is not of a layer of multi-token prediction. Engines only get such
    tensors."""
    return not any(re.fullmatch(pattern, name) for pattern in family_of(hf_config).kept_tensors(hf_config))


def written_rule_of(piece: ParameterPiece, hf_config: Any, *, is_classifier: bool) -> Rule | None:
    """Return the rule by which a parameter is written. The value head of a classifier is its score, of other models it
    is not written."""
    if is_classifier and piece.name.startswith(VALUE_HEAD_PREFIX):
        return CLASSIFIER_HEAD
    return rule_of(piece, hf_config)


def source_parts(
    piece: ParameterPiece, rule: Rule, sources: Sequence[Source], hf_config: Any, num_experts: int | None
) -> list[SourcePart]:
    """Return the parts of all sources that form a rank's piece."""
    local = torch.empty(piece.local.shape, device="meta")
    shapes = [tuple(part.shape) for part in rule.layout.split(local, len(sources), hf_config)]
    rows: dict[str, int] = {}
    starts = []
    for source, shape in zip(sources, shapes, strict=True):
        starts.append(rows.get(source.name, 0))
        # The number of rows includes a vocabulary's padding, which the file lacks. A vocabulary has one section.
        rows[source.name] = starts[-1] + shape[0] * (piece.num_shards if piece.shard_dimension == 0 else 1)
    return [
        _source_part(piece, rule.expert, source, shape, (start, rows[source.name]), hf_config.vocab_size, num_experts)
        for source, shape, start in zip(sources, shapes, starts, strict=True)
    ]


def _source_part(
    piece: ParameterPiece,
    expert: int | None,
    source: Source,
    local_shape: tuple[int, ...],
    section: tuple[int, int],
    vocabulary_size: int,
    num_experts: int | None,
) -> SourcePart:
    """Return one part. `section` is the part's first row in the tensor, and the tensor's number of rows."""
    shape, ranges = list(local_shape), [(0, length) for length in local_shape]
    cut = piece.shard_dimension
    if cut is not None:
        start = piece.shard_rank * local_shape[cut]
        shape[cut], ranges[cut] = piece.num_shards * local_shape[cut], (start, start + local_shape[cut])
    offset, shape[0] = section
    ranges[0] = (ranges[0][0] + offset, ranges[0][1] + offset)
    if piece.is_vocabulary:
        shape[0] = vocabulary_size
        start, stop = ranges[0]
        ranges[0] = (min(start, vocabulary_size), min(stop, vocabulary_size))
    if source.is_transposed:
        shape[:2], ranges[:2] = shape[1::-1], ranges[1::-1]
    if source.is_stacked:
        assert expert is not None  # rules with stacked sources belong to an expert
        assert num_experts is not None  # the model has experts
        shape, ranges = [num_experts, *shape], [(expert, expert + 1), *ranges]
    return SourcePart(source, tuple(shape), tuple(ranges), local_shape)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fills a model from a Hugging Face folder; every rank reads the slices that it holds, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.agreement import union_of_ranks
from nemo_rl_moe.models.megatron.families.rules import Rows, Rule
from nemo_rl_moe.models.megatron.hf_import_check import sort_out, unused_patterns
from nemo_rl_moe.models.megatron.hf_sources import SourcePart, rule_of, source_parts
from nemo_rl_moe.models.megatron.parameter_layout import ParameterPiece, parameter_pieces
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, listed, one_line
from nemo_rl_moe.models.safetensors_reader import SliceReader

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class _Reading:
    """A piece of a parameter, and what it is put together from."""

    piece: ParameterPiece
    rule: Rule
    parts: list[SourcePart]


@dataclass
class _Plan:
    """What one rank will read.

    Attributes:
        folder: Where from; None where it cannot be read.
        problems: What stands in the way, a line each.
        readings: File by file.
    """

    folder: SafetensorsFolder | None = None
    problems: list[str] = field(default_factory=list)
    readings: list[_Reading] = field(default_factory=list)

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """The tensors that it needs (a part of), with their whole shapes."""
        return {part.source.name: part.shape for reading in self.readings for part in reading.parts}


def load_weights(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    folder: Path,
    progress: Callable[[float], None] = lambda share: None,
) -> list[str]:
    """Fills every parameter. Every rank calls it; nothing is read before all ranks know that all of it can be.

    An expert bias that the folder has no tensor for keeps its zeros.

    Args:
        chunks: This rank's model chunks.
        config: Their configuration.
        hf_config: The model's Hugging Face configuration.
        folder: Holds safetensors files; every rank must reach it.
        progress: Gets the share that this rank has read.

    Returns:
        What of the folder was left out, a line for each reason; the same on every rank.

    Raises:
        ConfigurationError: The folder is damaged, lacks a tensor, holds one too many, or one has another shape or a
            type that cannot be read. The same on every rank.
    """
    plan = _plan(chunks, config, hf_config, folder)
    lines = _agreed(plan, hf_config, folder)
    problem = None
    try:
        assert plan.folder is not None  # all have agreed
        with SliceReader(plan.folder) as reader, torch.no_grad():
            for number, reading in enumerate(plan.readings, start=1):
                _read(reading, reader, hf_config)
                progress(number / len(plan.readings))
    except Exception as error:  # the others would wait for this rank for ever
        problem = f"policy.model_name: {folder}: cannot be read: {one_line(error)}"
    _raise_together([] if problem is None else [problem])
    return lines


def _plan(chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any, folder: Path) -> _Plan:
    plan = _Plan()
    try:
        plan.folder = SafetensorsFolder(folder)
    except ConfigurationError as error:
        plan.problems += error.problems
        return plan
    without_rule = []
    for piece in parameter_pieces(chunks, config):
        rule = rule_of(piece, hf_config)
        if rule is not None:
            choices = (rule.sources, *rule.alternatives)
            held = (choice for choice in choices if all(source.name in plan.folder.tensors for source in choice))
            sources = next(held, rule.sources)
            parts = source_parts(piece, rule, sources, hf_config, config.num_moe_experts)
            plan.readings.append(_Reading(piece, rule, parts))
        elif not piece.is_expert_bias:
            without_rule.append(piece.name)
    if without_rule:
        plan.problems.append(
            f"policy.model_name: {folder}: no tensor is known for {listed(without_rule)} of a {hf_config.model_type}"
        )
    place_of = {name: (tensor.file, name) for name, tensor in plan.folder.tensors.items()}
    plan.readings.sort(key=lambda reading: place_of.get(reading.parts[0].source.name, ("", "")))
    return plan


def _agreed(plan: _Plan, hf_config: Any, folder: Path) -> list[str]:
    """Raises what any rank has found wrong, on all of them; otherwise what will be left out."""
    _raise_together(plan.problems)
    assert plan.folder is not None  # it would be a problem
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, plan.folder.fingerprint)
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            raise ConfigurationError(
                f"policy.model_name: {folder}: rank {rank} finds other tensors than rank 0; all ranks must share the "
                "folder"
            )
    problems, left_out = sort_out(plan.folder, union_of_ranks(plan.wanted), unused_patterns(hf_config))
    if problems:
        raise ConfigurationError([f"policy.model_name: {folder}: {problem}" for problem in problems])
    return [tensors.line(folder) for tensors in left_out]


def _raise_together(problems: Sequence[str]) -> None:
    """Raises the problems of the first rank that has any, on all of them; every rank must take part."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(problems))
    ranks = [rank for rank, lines in enumerate(found) if lines]
    if not ranks:
        return
    lines = found[ranks[0]]
    if len(ranks) < len(found):
        lines = [f"{line} (on rank {ranks[0]})" for line in lines]
    raise ConfigurationError(lines)


def _read(reading: _Reading, reader: SliceReader, hf_config: Any) -> None:
    """Fills one piece."""
    local = reading.piece.local
    if reading.piece.is_vocabulary:
        local.zero_()  # the padding stays so
    if len(reading.parts) == 1 and isinstance(reading.rule.layout, Rows):
        (part,) = reading.parts
        reader.read_into(part.in_file_order(local), part.source.name, part.ranges)
        return
    tensors = []
    for part in reading.parts:
        tensors.append(torch.empty(part.local_shape, dtype=reader.dtype(part.source.name)))
        reader.read_into(part.in_file_order(tensors[-1]), part.source.name, part.ranges)
    local.copy_(reading.rule.layout.join(tensors, hf_config))

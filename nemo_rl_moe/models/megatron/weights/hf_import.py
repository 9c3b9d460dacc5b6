# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Import of Hugging Face weights. Every rank reads its slices after all ranks know that the folder fits the model."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.checksums import ACCEPTING
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.families.rules import ROTARY_BUFFERS, Rows, Rule
from nemo_rl_moe.models.megatron.model.agreement import DamageSearch, union_of_ranks
from nemo_rl_moe.models.megatron.model.value_head import PREFIX as VALUE_HEAD_PREFIX
from nemo_rl_moe.models.megatron.weights.hf_sources import (
    CLASSIFIER_HEAD,
    OUTPUT_LAYER,
    SourcePart,
    copies_of,
    rule_of,
    source_parts,
)
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece, parameter_pieces
from nemo_rl_moe.models.safetensors_files import MOST_MAPPED_BYTES, TYPES, SliceReader, type_problems
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, count_of, listed, one_line

_EMBEDDING = "embedding.word_embeddings.weight"
KEPT = "of multi-token prediction (MTP) layers, kept unchanged in exported folders and not trained"
_COPY = "a copy of the model's embedding or output layer, exported as these are trained"
_TIED = "the output layer is the embedding (tie_word_embeddings)"


def unused_patterns(hf_config: Any) -> dict[str, str]:
    """Return a mapping: regular expression of tensor names -> reason why a model with this configuration ignores these
    tensors."""
    family = family_of(hf_config)
    output = family.rules.find(OUTPUT_LAYER) if hf_config.tie_word_embeddings else None
    tied = {} if output is None else {re.escape(source.name): _TIED for source in output.sources}
    return {**ROTARY_BUFFERS, **tied, **family.unused_tensors(hf_config)}


def sort_out(
    folder: SafetensorsFolder, wanted: Mapping[str, tuple[int, ...]], unused: Mapping[str, str], kept: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Compare a folder's tensors with the wanted tensors. Return problems, and lines on tensors that are not loaded.

    Args:
        wanted: Name -> full shape of each tensor that a rank needs.
        unused: Result of `unused_patterns`.
        kept: Patterns of the tensors that are only copied (`ModelFamily.kept_tensors`).
    """
    problems = []
    missing = sorted(wanted.keys() - folder.tensors.keys())
    if missing:
        text = f"{count_of(missing)} missing: {listed(missing)}"
        unindexed = [name for name in missing if name in folder.without_entry]
        if unindexed:
            file = folder.without_entry[unindexed[0]]
            text += f"; the index has no entry for {listed(unindexed)}, though {file} holds {unindexed[0]}"
        problems.append(text)
    ignored: dict[str, list[str]] = {}
    copied = sorted(folder.only(kept).tensors.keys() - wanted.keys())
    extra = []
    for name in sorted(folder.tensors.keys() - wanted.keys() - set(copied)):
        why = next((why for pattern, why in unused.items() if re.fullmatch(pattern, name)), None)
        if why is None:
            extra.append(name)
        else:
            ignored.setdefault(why, []).append(name)
    if extra:
        problems.append(f"{count_of(extra)} that the model has no place for: {listed(extra)}")
    problems += _other_shapes_and_types(folder, wanted)
    lines = [f"{count_of(names)} left out: {listed(names)}: {why}" for why, names in ignored.items()]
    return problems, lines + ([f"{count_of(copied)} {KEPT}: {listed(copied)}"] if copied else [])


def _other_shapes_and_types(folder: SafetensorsFolder, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    found = {name: folder.tensors[name] for name in sorted(wanted.keys() & folder.tensors.keys())}
    shapes = [
        f"{name} (got {list(tensor.shape)}, expected {list(wanted[name])})"
        for name, tensor in found.items()
        if tensor.shape != wanted[name]
    ]
    problems = []
    if shapes:
        problems.append(f"{count_of(shapes)} of another shape: {listed(shapes)}")
    return problems + type_problems(found)


@dataclass(frozen=True)
class _Reading:
    piece: ParameterPiece
    rule: Rule
    parts: list[SourcePart]


@dataclass
class _Plan:
    folder: SafetensorsFolder | None = None
    problems: list[str] = field(default_factory=list)
    readings: list[_Reading] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    trains_mtp: bool = False

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Name -> full shape, for each tensor of which this rank needs a part."""
        return {part.source.name: part.shape for reading in self.readings for part in reading.parts}


def load_weights(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    folder: Path,
    progress: Callable[[float], None] = lambda share: None,
    *,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Fill every wanted parameter, and return lines on ignored, kept and rounded tensors. Every rank calls it.

    Reading begins after all ranks know that they can read. If the folder has no tensor for an expert bias or a value
    head, the bias stays 0 and the value head unchanged. The head of a sequence classifier is read as the value head. A
    model that predicts only values and is read from a classifier gets an output layer of zeros.

    Args:
        is_wanted: Function of a parameter's canonical name: whether to read it.
    """
    plan = _plan(chunks, config, hf_config, folder, is_wanted)
    lines = _agreed(plan, hf_config, folder)
    assert plan.folder is not None  # otherwise _agreed has raised
    search = DamageSearch(folder)
    problems = []
    try:
        with SliceReader(plan.folder) as reader, torch.no_grad():
            for number, reading in enumerate(plan.readings, start=1):
                _read(reading, reader, hf_config)
                progress(number / len(plan.readings))
    except Exception as error:  # the other ranks wait for this one
        problems = [f"policy.model_name: {folder}: cannot be read: {one_line(error)}"]
    if damage := search.of_all_ranks():
        hint = ACCEPTING.format(folder=folder)
        raise ConfigurationError([f"policy.model_name: {line}; {hint}" for line in damage])
    _raise_together(problems)
    return lines


def _plan(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    folder: Path,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> _Plan:
    plan = _Plan()
    plan.copies = [name for names in copies_of(chunks, hf_config).values() for name in names]
    plan.trains_mtp = any(chunk.trains_mtp for chunk in chunks)
    try:
        plan.folder = SafetensorsFolder(folder)
    except ConfigurationError as error:
        plan.problems += error.problems
        return plan
    without_rule = []
    is_classifier = CLASSIFIER_HEAD.sources[0].name in plan.folder.tensors
    values_alone = any(chunk.has_value_head and not chunk.predicts_tokens for chunk in chunks)
    found: list[tuple[ParameterPiece, Rule, list[list[SourcePart]], list[int]]] = []
    for piece in filter(lambda piece: is_wanted(piece.name), parameter_pieces(chunks, config)):
        of_value_head = piece.name.startswith(VALUE_HEAD_PREFIX)
        rule = CLASSIFIER_HEAD if of_value_head and is_classifier else rule_of(piece, hf_config)
        if is_classifier and values_alone and piece.name == OUTPUT_LAYER and not hf_config.tie_word_embeddings:
            with torch.no_grad():
                piece.local.zero_()  # a classifier has no output layer, and nothing uses it
        elif rule is not None:
            forms = _forms_in(plan.folder, piece, rule, hf_config, config.num_moe_experts)
            found.append((piece, rule, forms, _fitting(plan.folder, forms)))
        elif not piece.is_expert_bias and not of_value_head:
            without_rule.append(piece.name)
    # A square matrix fits in both orientations. Matrices that fit in only one orientation decide.
    decided = {fitting[0] for _, _, forms, fitting in found if len(forms) > 1 and len(fitting) == 1}
    for piece, rule, forms, fitting in found:
        chosen = next((form for form in fitting if form in decided), fitting[0] if fitting else 0)
        plan.readings.append(_Reading(piece, rule, forms[chosen]))
    if without_rule:
        plan.problems.append(
            f"policy.model_name: {folder}: no Hugging Face tensor of {hf_config.model_type} is known for the parameters"
            f" {listed(without_rule)}"
        )
    order = {name: (tensor.file, name) for name, tensor in plan.folder.tensors.items()}
    plan.readings.sort(key=lambda reading: order.get(reading.parts[0].source.name, ("", "")))
    return plan


def _forms_in(
    folder: SafetensorsFolder, piece: ParameterPiece, rule: Rule, hf_config: Any, num_experts: int | None
) -> list[list[SourcePart]]:
    """Return a list of parts of a piece for each form, such as a stacked tensor of all experts, that the folder has.

    If the folder has none of the known forms, the result has the parts of the first form.
    """
    forms = [
        source_parts(piece, rule, sources, hf_config, num_experts)
        for sources in (rule.sources, *rule.alternatives)
        if all(source.name in folder.tensors for source in sources)
    ]
    return forms or [source_parts(piece, rule, rule.sources, hf_config, num_experts)]


def _fitting(folder: SafetensorsFolder, forms: Sequence[Sequence[SourcePart]]) -> list[int]:
    """Return the indices of the forms of a piece whose shapes equal the shapes of the folder's tensors."""
    tensors = folder.tensors
    return [
        index
        for index, parts in enumerate(forms)
        if all(part.source.name in tensors and tensors[part.source.name].shape == part.shape for part in parts)
    ]


def _agreed(plan: _Plan, hf_config: Any, folder: Path) -> list[str]:
    """Raise the problems of any rank on all ranks. Without a problem, return lines on ignored and rounded tensors."""
    _raise_together(plan.problems)
    assert plan.folder is not None  # otherwise there is a problem
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, plan.folder.fingerprint)
    for rank, fingerprint in enumerate(found):
        if fingerprint != found[0]:
            raise ConfigurationError(
                f"policy.model_name: {folder}: rank {rank} finds other tensors than rank 0; all ranks must share the "
                "folder"
            )
    kept = () if plan.trains_mtp else family_of(hf_config).kept_tensors(hf_config)
    unused = unused_patterns(hf_config) | dict.fromkeys(map(re.escape, plan.copies), _COPY)
    problems, ignored = sort_out(plan.folder, union_of_ranks(plan.wanted), unused, kept)
    problems += _other_head(plan.folder, hf_config)
    if problems:
        raise ConfigurationError([f"policy.model_name: {folder}: {problem}" for problem in problems])
    return [f"{folder}: {line}" for line in (*ignored, *_rounded(plan, plan.folder))]


def _other_head(folder: SafetensorsFolder, hf_config: Any) -> list[str]:
    """Return a message if the output layer differs from the embedding, although the configuration ties them.

    Rank 0 reads both tensors.
    """
    if not hf_config.tie_word_embeddings:
        return []
    names = [
        rule.sources[0].name
        for rule in map(family_of(hf_config).rules.find, (_EMBEDDING, OUTPUT_LAYER))
        if rule is not None and rule.sources[0].name in folder.tensors
    ]
    found: list[Any] = [[]]
    if dist.get_rank() == 0 and len(names) == 2 and not _are_equal(folder, *names):
        found[0] = [
            f"{names[1]} is not {names[0]}, though tie_word_embeddings is true; transformers keeps both then. Expected"
            f" tie_word_embeddings false in config.json, or a folder without {names[1]}"
        ]
    dist.broadcast_object_list(found)
    problems: list[str] = found[0]
    return problems


def _are_equal(folder: SafetensorsFolder, first: str, second: str) -> bool:
    tensors = folder.tensors
    if tensors[first].shape != tensors[second].shape:
        return False
    rows, *rest = tensors[first].shape
    band = max(1, MOST_MAPPED_BYTES // (8 * max(math.prod(rest), 1)))
    with SliceReader(folder) as reader:
        for start in range(0, rows, band):
            count = min(band, rows - start)
            both = [torch.empty(count, *rest, dtype=torch.float64) for _ in range(2)]
            for target, name in zip(both, (first, second), strict=True):
                reader.read_into(target, name, [(start, start + count), *((0, size) for size in rest)])
            if not torch.equal(*both):
                return False
    return True


def _rounded(plan: _Plan, stored: SafetensorsFolder) -> list[str]:
    """Return a line on tensors that a folder of mixed types holds more precisely than the model does."""
    names = {
        part.source.name: part.shape
        for reading in plan.readings
        for part in reading.parts
        if TYPES[stored.tensors[part.source.name].dtype].itemsize > reading.piece.local.dtype.itemsize
    }
    rounded = sorted(union_of_ranks(names))
    if not rounded or len({tensor.dtype for tensor in stored.tensors.values()}) == 1:
        return []
    types = sorted({stored.tensors[name].dtype for name in rounded})
    return [
        f"{count_of(rounded)} of type {', '.join(types)} rounded to policy.precision, which is the type of the folder's"
        f" other tensors: {listed(rounded)}"
    ]


def _raise_together(problems: Sequence[str]) -> None:
    """Raise the problems of the first rank with problems on all ranks. Every rank calls it."""
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
    local = reading.piece.local
    if reading.piece.is_vocabulary:
        local.zero_()  # for the padding
    if len(reading.parts) == 1 and isinstance(reading.rule.layout, Rows):
        (part,) = reading.parts
        reader.read_into(part.in_file_order(local), part.source.name, part.ranges)
        return
    tensors = []
    for part in reading.parts:
        tensors.append(torch.empty(part.local_shape, dtype=reader.dtype(part.source.name)))
        reader.read_into(part.in_file_order(tensors[-1]), part.source.name, part.ranges)
    local.copy_(reading.rule.layout.join(tensors, hf_config))

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a folder holds the tensors that the model needs, and nothing that it has no place for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.models.megatron.families import family_of
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, listed
from nemo_rl_moe.models.safetensors_reader import TYPES

# Older versions of transformers saved these; they follow from the configuration.
_ROTARY_BUFFERS = {r".*\.rotary_emb\.inv_freq": "buffers of the rotary embedding, which follow from config.json"}
_TIED_OUTPUT = {r"lm_head\.weight": "the output layer is the embedding (tie_word_embeddings)"}


@dataclass(frozen=True)
class LeftOut:
    """Tensors of a folder that a model has no use for.

    Attributes:
        names: Their names.
        why: Why there is none.
    """

    names: Sequence[str]
    why: str

    def line(self, folder: Any) -> str:
        """For the user."""
        return f"{folder}: {_count(self.names)} left out: {listed(list(self.names))}: {self.why}"


def unused_patterns(hf_config: Any) -> dict[str, str]:
    """Regular expressions of the tensors that such a model's files may hold and it does not use, each with why."""
    tied = _TIED_OUTPUT if hf_config.tie_word_embeddings else {}
    return {**_ROTARY_BUFFERS, **tied, **family_of(hf_config).unused_tensors(hf_config)}


def sort_out(
    folder: SafetensorsFolder, wanted: Mapping[str, tuple[int, ...]], unused: Mapping[str, str]
) -> tuple[list[str], list[LeftOut]]:
    """Compares a folder with what the ranks of a job need.

    Args:
        folder: The folder.
        wanted: Shape of each tensor that any rank needs.
        unused: Regular expressions of tensors that may be there besides, each with why.

    Returns:
        What is wrong, a line for each kind; and what will be left out.
    """
    problems = []
    missing = sorted(wanted.keys() - folder.tensors.keys())
    if missing:
        text = f"{_count(missing)} missing: {listed(missing)}"
        unindexed = [name for name in missing if name in folder.without_entry]
        if unindexed:
            file = folder.without_entry[unindexed[0]]
            text += f"; the index has no entry for {listed(unindexed)}, though {file} holds {unindexed[0]}"
        problems.append(text)
    left_out: dict[str, list[str]] = {}
    extra = []
    for name in sorted(folder.tensors.keys() - wanted.keys()):
        why = next((why for pattern, why in unused.items() if re.fullmatch(pattern, name)), None)
        if why is None:
            extra.append(name)
        else:
            left_out.setdefault(why, []).append(name)
    if extra:
        problems.append(f"{_count(extra)} that the model has no place for: {listed(extra)}")
    problems += _other_shapes_and_types(folder, wanted)
    return problems, [LeftOut(names, why) for why, names in left_out.items()]


def _other_shapes_and_types(folder: SafetensorsFolder, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    found = {name: folder.tensors[name] for name in sorted(wanted.keys() & folder.tensors.keys())}
    shapes = [
        f"{name} (got {list(tensor.shape)}, expected {list(wanted[name])})"
        for name, tensor in found.items()
        if tensor.shape != wanted[name]
    ]
    types = [f"{name} ({tensor.dtype})" for name, tensor in found.items() if tensor.dtype not in TYPES]
    problems = []
    if shapes:
        problems.append(f"{_count(shapes)} of another shape: {listed(shapes)}")
    if types:
        problems.append(
            f"{_count(types)} of a type that cannot be read: {listed(types)}; allowed: {', '.join(TYPES)}; "
            "convert quantised weights to BF16 first"
        )
    return problems


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'}"

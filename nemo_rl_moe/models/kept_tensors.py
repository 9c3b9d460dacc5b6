# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model that are not loaded, and that every folder of its trained weights contains unchanged.

These are layers of multi-token prediction (MTP), by which engines draft tokens. They are copied from file to file in
bands, so that they take no memory.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.hf_files import holds_megatron_weights
from nemo_rl_moe.models.safetensors_files import (
    MAX_SHARD_BYTES,
    TYPES,
    SafetensorsWriter,
    SliceReader,
    TensorHeader,
    split_into_files,
    type_problems,
    write_index,
)
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, count_of, listed

KEPT_FOLDER = "kept_tensors"
"""Subfolder of the kept tensors in a folder in Megatron-Core's format, such as a checkpoint."""


def find_kept(folder: Path | None, hf_config: Any) -> SafetensorsFolder | None:
    """Return the tensors to keep of a model's folder in either format, or None if it has none.

    Args:
        folder: Folder of the initial weights, or None for random weights.

    Raises:
        ConfigurationError: Files are damaged, a tensor's type cannot be read, or `KEPT_FOLDER` is no folder or has
            other tensors.
    """
    if folder is None:
        return None
    patterns, is_stored = family_of(hf_config).kept_tensors(hf_config), holds_megatron_weights(folder)
    if is_stored:
        folder = folder / KEPT_FOLDER
        if not folder.is_symlink() and not folder.exists():
            return None
        if not folder.is_dir():
            raise ConfigurationError(f"policy.model_name: {folder}: expected a folder")
    elif not patterns:
        return None
    held = SafetensorsFolder(folder)
    kept = held.only(patterns)
    problems = type_problems(kept.tensors)
    if is_stored and (others := sorted(held.tensors.keys() - kept.tensors.keys())):
        # They would take the place of the model's own tensors in exported weights.
        problems.append(f"{count_of(others)} of no layer of multi-token prediction in config.json: {listed(others)}")
    if problems:
        raise ConfigurationError([f"policy.model_name: {folder}: {problem}" for problem in problems])
    return kept if kept.tensors else None


def kept_headers(kept: SafetensorsFolder | None) -> list[TensorHeader]:
    """Return the headers of the kept tensors, larger types first, and file by file for the reader."""
    if kept is None:
        return []
    found = kept.tensors
    order = sorted(found, key=lambda name: (-TYPES[found[name].dtype].itemsize, found[name].file, name))
    return [TensorHeader(name, found[name].shape, TYPES[found[name].dtype]) for name in order]


def kept_bands(kept: SafetensorsFolder, headers: Iterable[TensorHeader]) -> Iterator[Tensor]:
    """Yield the entries of kept tensors in bands, as `SafetensorsWriter.write` takes them.

    Raises:
        OSError: The folder of the tensors can no longer be read.
    """
    with SliceReader(kept) as reader:
        for header in headers:
            yield from reader.bands(header.name)


def write_kept(kept: SafetensorsFolder, folder: Path) -> None:
    """Write the kept tensors into a new folder with checksums.

    Raises:
        OSError: A file cannot be read or written.
    """
    folder.mkdir()
    headers = kept_headers(kept)
    files = write_index(folder, split_into_files(headers, MAX_SHARD_BYTES))
    writer = SafetensorsWriter(folder, files)
    try:
        for band in kept_bands(kept, headers):
            writer.write(band)
    finally:
        writer.close()
    write_inventory(folder, writer.parts)

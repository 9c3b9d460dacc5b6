# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is data, never code: what may stand in its files, and a reader that refuses everything else.

torch and Megatron-Core unpickle the index `.metadata` and objects in the data files without any restriction, so that a
checkpoint from elsewhere can run code in every worker that loads it. Here the index may name nothing but the classes
that an index is made of, and a checkpoint holds tensors alone.
"""

import importlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

INDEX_FILE = ".metadata"
_TORCH_OVERRIDE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
_FILES, _MEGATRON = "torch.distributed.checkpoint.filesystem", "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("MetadataIndex", "_MEM_FORMAT_ENCODING", "StorageMeta", "BytesStorageMetadata")),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    *((_FILES, name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    """Builds what an index is made of; any other name in the file ends the reading before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _ALLOWED and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return getattr(importlib.import_module(module), name)


class DataOnlyReader(FileSystemReader):
    """Reads a checkpoint folder whose index holds descriptions of tensors and nothing else.

    Raises:
        CheckpointError: The index is missing, damaged, or names anything but tensors.
    """

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        self._folder = Path(folder)
        self._index: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The index, read once."""
        if self._index is None:
            self._index = read_index(self._folder)
        return self._index


def read_index(folder: Path) -> Metadata:
    """Reads `.metadata` without running anything that it names.

    Raises:
        CheckpointError: The index is missing, damaged, or names anything but tensors.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged file can fail in any way
        raise CheckpointError(f"{path}: damaged: {type(error).__name__}: {error}") from None
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path}: refused: it holds {type(index).__name__}, expected the index of a checkpoint")
    objects = [name for name, entry in index.state_dict_metadata.items() if type(entry) is not TensorStorageMetadata]
    if objects:
        raise CheckpointError(f"{path}: refused: {objects[0]} is a pickled object, expected tensors only")
    for info in index.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{path}: refused: {info.relative_path} lies outside of the checkpoint's folder")
    return index


@contextmanager
def data_only() -> Iterator[None]:
    """While open, Megatron-Core reads checkpoints through `DataOnlyReader`, and torch unpickles tensors only."""
    with patch.object(torch_strategies, "_get_filesystem_reader", lambda folder, *_, **__: DataOnlyReader(folder)):
        overridden = os.environ.pop(_TORCH_OVERRIDE, None)
        try:
            yield
        finally:
            if overridden is not None:
                os.environ[_TORCH_OVERRIDE] = overridden

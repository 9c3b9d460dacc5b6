# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is data, never code: what may stand in its folder, and a reader that refuses everything else.

torch and Megatron-Core unpickle the index `.metadata` and objects in the data files without any restriction, so that a
checkpoint from elsewhere can run code in every worker that loads it. Here the index may name nothing but the classes
that an index is made of, a checkpoint holds tensors alone, and every file that is read is one of the folder's own.
"""

import hashlib
import importlib
import io
import json
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

INDEX_FILE, COMMON_FILE, FORMAT_FILE = ".metadata", "common.pt", "metadata.json"
FORMAT = ("torch_dist", 1)
_FORMAT_KEYS = dict(zip(("sharded_backend", "sharded_backend_version"), FORMAT, strict=True))
_COMMON_KEYS = {"common_backend": "torch", "common_backend_version": 1}  # written by some releases of Megatron-Core
_MOST_BYTES = {INDEX_FILE: 2**30, COMMON_FILE: 2**20, FORMAT_FILE: 2**16}
_TORCH_OVERRIDE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@dataclass(frozen=True)
class CheckedFolder:
    """A checkpoint's folder that was found to hold tensors and nothing else.

    Attributes:
        index: What tensors it holds, and where.
        fingerprint: Of the small files; differs between two checkpoints.
    """

    index: Metadata
    fingerprint: str


class DataOnlyReader(FileSystemReader):
    """Reads the tensors of a checkpoint folder by an index that was checked.

    Args:
        folder: The checkpoint.
        index: As `check_folder` read it; it is not read again.
    """

    def __init__(self, folder: str | Path, index: Metadata):
        super().__init__(folder)
        self._index = index

    def read_metadata(self) -> Metadata:
        """The index."""
        return self._index


def check_folder(folder: Path) -> CheckedFolder:
    """Reads a checkpoint's small files without running anything that they name, and looks at the large ones.

    Raises:
        CheckpointError: A file is missing, damaged, too short, no regular file of this folder, or holds anything but
            tensors.
    """
    content = {name: _read(folder, name) for name in _MOST_BYTES}
    index = _parse(folder / INDEX_FILE, content[INDEX_FILE])
    _check_common(folder / COMMON_FILE, content[COMMON_FILE])
    _check_format(folder / FORMAT_FILE, content[FORMAT_FILE])
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = _size(folder, name)
        if size < end:
            raise CheckpointError(f"{folder / name}: damaged: {size} bytes, expected at least {end}")
    return CheckedFolder(index, hashlib.sha256(b"".join(content.values())).hexdigest())


@contextmanager
def data_only(index: Metadata) -> Iterator[None]:
    """While open, Megatron-Core reads the checkpoint of this index, and torch unpickles tensors only."""
    with patch.object(
        torch_strategies, "_get_filesystem_reader", lambda folder, *_, **__: DataOnlyReader(folder, index)
    ):
        overridden = os.environ.pop(_TORCH_OVERRIDE, None)
        try:
            yield
        finally:
            if overridden is not None:
                os.environ[_TORCH_OVERRIDE] = overridden


def _size(folder: Path, name: str) -> int:
    """Bytes of a file that may be read: opening a pipe would wait for ever, a device can be without end."""
    path = folder / name
    try:
        is_inside = path.resolve().parent == folder.resolve()
        status = path.stat()
    except (OSError, RuntimeError) as error:  # the latter: a link to itself
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not is_inside:
        raise CheckpointError(f"{path}: refused: it is a link that leaves the checkpoint's folder")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: refused: it is no regular file")
    return status.st_size


def _read(folder: Path, name: str) -> bytes:
    path, most = folder / name, _MOST_BYTES[name]
    size = _size(folder, name)
    if size > most:
        raise CheckpointError(f"{path}: refused: {size} bytes, expected at most {most}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(path: Path, content: bytes) -> Metadata:
    try:
        return parse_index(content)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused: {error}") from None
    except Exception as error:  # a damaged file can fail in any way
        raise CheckpointError(f"{path}: damaged: {type(error).__name__}: {error}") from None


def _check_common(path: Path, content: bytes) -> None:
    """Megatron-Core keeps here what is no tensor; in these checkpoints there is nothing of the kind."""
    overridden = os.environ.pop(_TORCH_OVERRIDE, None)
    try:
        found: Any = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # a damaged file can fail in any way
        raise CheckpointError(f"{path}: refused or damaged: it holds something else than tensors") from None
    finally:
        if overridden is not None:
            os.environ[_TORCH_OVERRIDE] = overridden
    if type(found) is not dict or found:
        raise CheckpointError(f"{path}: refused: expected an empty dictionary, all tensors are elsewhere")


def _check_format(path: Path, content: bytes) -> None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: damaged: it is no JSON") from None
    if found not in (_FORMAT_KEYS, _FORMAT_KEYS | _COMMON_KEYS):
        raise CheckpointError(f"{path}: refused: expected the format {FORMAT[0]}, version {FORMAT[1]}")


_BUILT = {
    (built.__module__, built.__name__): built
    for built in (
        *(Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, ChunkStorageMetadata, TensorProperties),
        *(descriptions.BytesStorageMetadata, _StorageInfo),
    )
}
"""Classes that an index is made of; the last but one is known in order to be refused by the name of its entry."""


def _path(*parts: str) -> str:
    """In place of a path: nothing asks where the index says that it was written."""
    return "/".join(map(str, parts))


def _layout(name: str) -> torch.layout:
    if name != str(torch.strided):
        raise pickle.UnpicklingError("a tensor is not dense")
    return torch.strided


def _memory_format(number: int) -> Any:
    return descriptions._MEM_FORMAT_ENCODING(int(number))


_CALLED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    (descriptions.__name__, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("pathlib", "PosixPath"): _path,
}


# The one in C cannot be told what its instructions may change.
class _IndexUnpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for; most names stand for nothing."""
        found = _BUILT.get((module, name)) or _CALLED.get((module, name))
        if found is not None:
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")

    def load_build(self) -> None:
        """Gives an object its attributes. The original sets them on whatever stands there, on torch's classes too."""
        state, built = self.stack.pop(), self.stack[-1]  # type: ignore[attr-defined]
        if type(built) not in _BUILT.values():
            raise pickle.UnpicklingError(f"it changes {getattr(built, '__name__', type(built).__name__)}")
        if type(built) is TensorProperties:
            TensorProperties.__setstate__(built, state)
        elif type(state) is dict:
            vars(built).update(state)
        else:
            raise pickle.UnpicklingError(f"it changes {type(built).__name__} in another way than an index does")

    dispatch[pickle.BUILD[0]] = load_build


def parse_index(content: bytes) -> Metadata:
    """Reads an index.

    Args:
        content: Of the index file.

    Returns:
        A new object that holds descriptions of tensors, and where in the folder's files they lie.

    Raises:
        pickle.UnpicklingError: It names or holds anything else; why, in a few words.
        Exception: It is damaged: of any kind.
    """
    index = _IndexUnpickler(io.BytesIO(content)).load()
    if type(index) is not Metadata:
        raise pickle.UnpicklingError(f"it holds {type(index).__name__}, expected the index of a checkpoint")
    for kind in ("state_dict_metadata", "storage_data"):
        if type(vars(index).get(kind)) is not dict:
            raise pickle.UnpicklingError(f"its {kind} is no dictionary")
    for name, entry in index.state_dict_metadata.items():
        _check_tensor(name, entry)
    for key, place in index.storage_data.items():
        _check_place(key, place)
    return Metadata(index.state_dict_metadata, storage_data=index.storage_data)


def _check_tensor(name: Any, entry: Any) -> None:
    if type(name) is not str:
        raise pickle.UnpicklingError(f"it describes a {type(name).__name__}, expected tensors by their names")
    if type(entry) is not TensorStorageMetadata:
        raise pickle.UnpicklingError(f"{name} is a pickled object, expected tensors only")
    attributes = vars(entry)
    properties, chunks = attributes.get("properties"), attributes.get("chunks")
    is_sound = (
        type(properties) is TensorProperties
        and type(properties.dtype) is torch.dtype
        and _is_size(attributes.get("size"))
        and type(chunks) is list
        and all(type(chunk) is ChunkStorageMetadata for chunk in chunks)
        and all(_is_size(vars(chunk).get(kind)) for chunk in chunks for kind in ("offsets", "sizes"))
    )
    if not is_sound:
        raise pickle.UnpicklingError(f"{name} is not described as a tensor is")


def _check_place(key: Any, place: Any) -> None:
    if type(key) is not MetadataIndex or type(key.fqn) is not str or type(place) is not _StorageInfo:
        raise pickle.UnpicklingError(f"its storage_data holds {type(key).__name__} and {type(place).__name__}")
    name = vars(place).get("relative_path")
    if type(name) is not str or "/" in name or "\0" in name or name in ("", ".", ".."):
        raise pickle.UnpicklingError(f"{name} lies outside of the checkpoint's folder")
    if not all(type(vars(place).get(kind)) is int and vars(place)[kind] >= 0 for kind in ("offset", "length")):
        raise pickle.UnpicklingError(f"{key.fqn} lies nowhere in {name}")
    if place.transform_descriptors is not None:
        raise pickle.UnpicklingError(f"{key.fqn} is compressed")


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size and all(extent >= 0 for extent in value)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Safe reading of a distributed checkpoint's index.

torch and Megatron-Core unpickle the index `.metadata` and objects in the data files without restriction, so a foreign
checkpoint can run code in every worker. In this module, an index may name only torch's classes for an index, and a
checkpoint may contain only tensors. (torch's `weights_only` reader only supports pickle protocol 2, and the index has
protocol 4.)
"""

import hashlib
import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast
from unittest.mock import patch

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from nemo_rl_moe.checked_reading import HashingReader, PartsRead, Place
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.families.rules import MTP_PREFIX

Result = TypeVar("Result")
INDEX_FILE, COMMON_FILE, FORMAT_FILE = ".metadata", "common.pt", "metadata.json"
FORMAT = ("torch_dist", 1)
_FORMAT_KEYS = dict(zip(("sharded_backend", "sharded_backend_version"), FORMAT, strict=True))
_COMMON_KEYS = {"common_backend": "torch", "common_backend_version": 1}  # written by some releases of Megatron-Core


class DataOnlyReader(FileSystemReader):
    """Reader of a checkpoint's tensors with a checked index.

    Args:
        index: Index from `check_folder`. It is not read again.
        parts: Receives the checksums of tensors and compares them. None skips the comparison.
    """

    def __init__(self, folder: str | Path, index: Metadata, parts: PartsRead | None):
        super().__init__(folder)
        self._index, self._parts = index, parts
        self._being_read: tuple[Place, HashingReader] | None = None

    def read_metadata(self) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        finally:
            self._compare()

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        self._compare()
        place = (sinfo.relative_path, sinfo.offset, sinfo.length)
        if self._parts is None:
            return super()._slice_file(file, sinfo)
        if place not in self._parts:
            self._parts.has_unlisted = True
            return super()._slice_file(file, sinfo)
        reader = HashingReader(file, sinfo.offset, sinfo.length)
        self._being_read = place, reader
        return cast(IO[bytes], reader)

    def _compare(self) -> None:
        """Compare the checksum of all bytes of the last tensor, even if reading the tensor failed."""
        if self._being_read is None:
            return
        assert self._parts is not None  # otherwise there is no HashingReader
        (place, reader), self._being_read = self._being_read, None
        with reader:
            self._parts.compare(place, reader.checksum())


def check_folder(folder: Path) -> tuple[Metadata, str]:
    """Return the index of a checkpoint and a hash of its small files, after safety checks and checks of file sizes.

    Raises:
        CheckpointError: A file is missing, damaged or truncated, or contains anything but tensors.
    """
    content = {name: _readable(folder / name, Path.read_bytes) for name in (INDEX_FILE, COMMON_FILE, FORMAT_FILE)}
    try:
        index = parse_index(content[INDEX_FILE])
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder / INDEX_FILE}: refused: {error}") from None
    except Exception as error:  # a torn file can fail in any way
        raise CheckpointError(f"{folder / INDEX_FILE}: damaged: {type(error).__name__}: {error}") from None
    _check_common(folder / COMMON_FILE, content[COMMON_FILE])
    _check_format(folder / FORMAT_FILE, content[FORMAT_FILE])
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = _readable(folder / name, Path.stat).st_size
        if size < end:
            raise CheckpointError(f"{folder / name}: damaged: {size} bytes, expected at least {end}")
    return index, hashlib.sha256(b"".join(content.values())).hexdigest()


def holds_mtp(folder: Path) -> bool:
    """Return whether a checkpoint has trained layers of multi-token prediction.

    Raises:
        CheckpointError: See `check_folder`.
    """
    index, _ = check_folder(folder)
    return any(name.startswith(MTP_PREFIX) for name in index.state_dict_metadata)


@contextmanager
def data_only(index: Metadata, parts: PartsRead | None) -> Iterator[None]:
    """Let Megatron-Core read with `DataOnlyReader` while the context is open."""
    with patch.object(
        torch_strategies, "_get_filesystem_reader", lambda folder, *_, **__: DataOnlyReader(folder, index, parts)
    ):
        yield


def _readable(path: Path, read: Callable[[Path], Result]) -> Result:
    try:
        return read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _check_common(path: Path, content: bytes) -> None:
    """Check that Megatron-Core's file for objects other than tensors is an empty dictionary."""
    try:
        found: Any = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # a torn file can fail in any way
        raise CheckpointError(f"{path}: refused or damaged: it holds something else than tensors") from None
    if type(found) is not dict or found:
        raise CheckpointError(f"{path}: refused: expected an empty dictionary, because all tensors are in other files")


def _check_format(path: Path, content: bytes) -> None:
    """Check the name of the format, because Megatron-Core imports code by this name."""
    try:
        found = json.loads(content)
    except ValueError:
        raise CheckpointError(f"{path}: damaged: it is no JSON") from None
    if found not in (_FORMAT_KEYS, _FORMAT_KEYS | _COMMON_KEYS):
        raise CheckpointError(f"{path}: refused: expected the format {FORMAT[0]}, version {FORMAT[1]}")


_CLASSES = {
    f"{known.__module__}.{known.__name__}": known
    for known in (
        *(Metadata, MetadataIndex, TensorStorageMetadata, _StorageInfo, descriptions.StorageMeta),
        *(descriptions.ChunkStorageMetadata, descriptions.TensorProperties, descriptions.BytesStorageMetadata),
    )
}
"""Classes of an index. `BytesStorageMetadata` is only read so that its entry can be refused by name."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    f"{descriptions.__name__}._MEM_FORMAT_ENCODING": descriptions._MEM_FORMAT_ENCODING,
    "pathlib.PosixPath": lambda *parts: "/".join(map(str, parts)),  # an unused record of the original folder
}


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that refuses all but the known classes and functions."""

    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get(f"{module}.{name}") or _FUNCTIONS.get(f"{module}.{name}")
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return found


def parse_index(content: bytes) -> Metadata:
    """Return the parsed index: descriptions of tensors, and their positions in the folder's files.

    Raises:
        pickle.UnpicklingError: The index names or contains anything else.
        Exception: The index is damaged. The error can have any type.
    """
    index = _IndexUnpickler(io.BytesIO(content)).load()
    if type(index) is not Metadata:
        raise pickle.UnpicklingError(f"it holds {type(index).__name__}, expected the index of a checkpoint")
    for name, entry in index.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise pickle.UnpicklingError(f"{name} is a pickled object, expected tensors only")
    return Metadata(index.state_dict_metadata, storage_data=index.storage_data)

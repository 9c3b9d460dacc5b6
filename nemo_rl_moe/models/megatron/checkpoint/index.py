# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parses a checkpoint's index, a pickle, so that nothing in it can call, change or name anything but descriptions.

torch unpickles an index without any restriction. Here a name that no index needs ends the reading, what may be named is
called to make new objects alone, and only objects that the reading itself has made are ever changed.
"""

import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch
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

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of safetensors files in pieces."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from nemo_rl_moe.checksums import HEADER, ChecksumStream, Part
from nemo_rl_moe.models.safetensors_folder import (
    INDEX_FILE,
    ONE_FILE,
    SafetensorsFolder,
    StoredTensor,
    count_of,
    listed,
)

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Name in files -> supported type of weights."""
MOST_MAPPED_BYTES = 2**26
MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of a written file, as in transformers."""


def type_problems(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return a line about the tensors of a type that cannot be read, if there are any."""
    found = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in TYPES]
    if not found:
        return []
    return [
        f"{count_of(found)} of a type that cannot be read: {listed(found)}; allowed: {', '.join(TYPES)}; "
        "convert quantised weights to BF16 first"
    ]


class SliceReader:
    """Reader of slices of stored tensors into existing tensors.

    Files are memory-mapped, and every page that was read counts as memory of this process until the file is closed. So
    only one file is open at a time, and the file is reopened after every 64 MiB. Callers should read file by file.
    """

    def __init__(self, folder: SafetensorsFolder, most_mapped_bytes: int = MOST_MAPPED_BYTES):
        self._folder, self._most_mapped_bytes = folder, most_mapped_bytes
        self._file: Any = None
        self._file_name = ""
        self._mapped_bytes = 0
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def dtype(self, name: str) -> torch.dtype:
        return TYPES[self._folder.tensors[name].dtype]

    def read_into(self, target: Tensor, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy a slice of a stored tensor into `target`, cast to the target's type.

        Raises:
            OSError: The file can no longer be read.
            SafetensorError: The file has changed.
        """
        lengths = [stop - start for start, stop in ranges]
        if 0 in lengths:
            return
        # Bands are read along the first dimension with more than one entry. All columns of a row are mapped.
        along = next((dimension for dimension, length in enumerate(lengths) if length > 1), 0)
        itemsize = self.dtype(name).itemsize
        mapped_bytes_each = itemsize * math.prod(self._folder.tensors[name].shape[along + 1 :])
        band = max(1, self._most_mapped_bytes // mapped_bytes_each)
        for first in range(0, lengths[along], band):
            count = min(band, lengths[along] - first)
            self._open_for(name, count * mapped_bytes_each)
            start = ranges[along][0] + first
            window = [slice(*limits) for limits in ranges]
            window[along] = slice(start, start + count)
            target.narrow(along, first, count).copy_(self._file.get_slice(name)[tuple(window)])
        self.bytes_read += itemsize * math.prod(lengths)

    def bands(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a stored tensor in order, each time as many as `most_mapped_bytes` allow, at least one.

        A tensor without dimensions is one row.
        """
        if not self._folder.tensors[name].shape:
            self._open_for(name, self.dtype(name).itemsize)
            self.bytes_read += self.dtype(name).itemsize
            yield self._file.get_tensor(name)[None]
            return
        rows, *rest = self._folder.tensors[name].shape
        band = max(1, self._most_mapped_bytes // (self.dtype(name).itemsize * max(math.prod(rest), 1)))
        for start in range(0, rows, band):
            target = torch.empty(min(band, rows - start), *rest, dtype=self.dtype(name))
            self.read_into(target, name, [(start, start + len(target)), *((0, size) for size in rest)])
            yield target

    def _open_for(self, name: str, mapped_bytes: int) -> None:
        file_name = self._folder.tensors[name].file
        if file_name != self._file_name or self._mapped_bytes + mapped_bytes > self._most_mapped_bytes:
            self._close()
            self._file = safe_open(self._folder.folder / file_name, framework="pt")
            self._file.__enter__()
            self._file_name = file_name
        self._mapped_bytes += mapped_bytes

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._file, self._file_name, self._mapped_bytes = None, "", 0


_TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorHeader:
    """Name, shape and type of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def split_into_files(tensors: Iterable[TensorHeader], max_bytes: int) -> list[list[TensorHeader]]:
    """Return the tensors distributed over files of a maximum size. A larger tensor gets a separate file."""
    files: list[list[TensorHeader]] = []
    held_bytes = 0
    for tensor in tensors:
        if not files or held_bytes + tensor.num_bytes > max_bytes:
            files.append([])
            held_bytes = 0
        files[-1].append(tensor)
        held_bytes += tensor.num_bytes
    return files


def file_names(count: int) -> list[str]:
    """Return the names that transformers gives to files of weights, such as `model-00001-of-00003.safetensors`."""
    return (
        [ONE_FILE]
        if count == 1
        else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )


def index_of(files: Mapping[str, Sequence[TensorHeader]]) -> dict[str, Any]:
    tensors = [tensor for held in files.values() for tensor in held]
    file_of = {tensor.name: name for name, held in files.items() for tensor in held}
    return {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            "total_size": sum(tensor.num_bytes for tensor in tensors),
        },
        "weight_map": dict(sorted(file_of.items())),
    }


def write_index(folder: Path, files: Sequence[Sequence[TensorHeader]]) -> dict[str, Sequence[TensorHeader]]:
    """Return name of each file -> its tensors, and write the index if there are several files."""
    named = dict(zip(file_names(len(files)), files, strict=True))
    if len(named) > 1:
        (folder / INDEX_FILE).write_text(json.dumps(index_of(named), indent=2) + "\n", encoding="utf-8")
    return named


class SafetensorsWriter:
    """Writer of safetensors files. `write` takes the entries of the tensors in the order of `files`.

    Args:
        files: Name of each file -> headers of its tensors.
    """

    def __init__(self, folder: Path, files: Mapping[str, Sequence[TensorHeader]]):
        self._folder = folder
        self._files = list(files.items())
        self._stream: ChecksumStream | None = None
        self._missing: list[TensorHeader] = []
        self._missing_bytes = 0
        self.parts: dict[str, list[Part]] = {}

    def write(self, numbers: Tensor) -> None:
        if self._stream is None:
            self._begin_file()
        assert self._stream is not None  # just opened
        content = numbers.contiguous().view(-1).view(torch.uint8).numpy()
        assert content.nbytes <= self._missing_bytes  # no more than the rest of one tensor
        self._stream.write(content.data)
        self._missing_bytes -= content.nbytes
        self._end_tensors()

    def close(self) -> None:
        """Stop writing. An incomplete file stays incomplete."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @property
    def is_complete(self) -> bool:
        return not self._files

    def _begin_file(self) -> None:
        name, tensors = self._files[0]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in tensors:
            begin, end = end, end + tensor.num_bytes
            header[tensor.name] = {
                "dtype": _TYPE_NAMES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        # "x" fails for an existing file, which another rank has written.
        self._stream = ChecksumStream((self._folder / name).open("xb"))
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._stream.end_part(HEADER)
        self._missing = list(tensors)
        self._missing_bytes = tensors[0].num_bytes

    def _end_tensors(self) -> None:
        """Mark the written tensor, and empty tensors after it, as complete. After the last tensor, end the file."""
        assert self._stream is not None  # opened by `write`
        while not self._missing_bytes:
            self._stream.end_part(self._missing.pop(0).name)
            if not self._missing:
                self._end_file()
                return
            self._missing_bytes = self._missing[0].num_bytes

    def _end_file(self) -> None:
        assert self._stream is not None  # opened by `write`
        self._stream.to_disk()
        name, tensors = self._files.pop(0)
        self.parts[name] = self._stream.parts
        self.close()
        with safe_open(self._folder / name, framework="pt") as file:
            for tensor in tensors:
                found = file.get_slice(tensor.name)
                if (tuple(found.get_shape()), found.get_dtype()) != (tensor.shape, _TYPE_NAMES[tensor.dtype]):
                    raise OSError(f"{name}: {tensor.name} was written, but the file does not contain it")

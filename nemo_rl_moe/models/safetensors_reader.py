# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads slices of tensors out of a folder's files, with little memory however large they are."""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights that can be read and written, by their names in files."""
MOST_MAPPED_BYTES = 2**26


class SliceReader:
    """Copies slices into tensors that are there already.

    Files are mapped into memory, and every page that was read counts as this process's until the file is closed. So
    one file is open at a time, and it is opened anew after every 64 MiB. Callers that go file by file open each once.

    Args:
        folder: Where the tensors are.
        most_mapped_bytes: After so many a file is opened anew.

    Attributes:
        bytes_read: So far: the slices' own bytes.
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
        """A tensor's type in its file."""
        return TYPES[self._folder.tensors[name].dtype]

    def read_into(self, target: Tensor, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Copies a slice, cast to the target's type.

        Args:
            target: Of the slice's shape; any strides, any device.
            name: The tensor.
            ranges: For each dimension the first index and the one after the last.

        Raises:
            OSError: The file cannot be read any more.
            SafetensorError: It has changed.
        """
        lengths = [stop - start for start, stop in ranges]
        if 0 in lengths:
            return
        # In bands along the first dimension that has more than one entry; all columns of a row are mapped.
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

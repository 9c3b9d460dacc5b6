# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reader of a file with one record per line, while a run appends to the file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from nemo_rl_moe.errors import DataError

Record = TypeVar("Record")
Content = TypeVar("Content")
NO_RECORD = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors that parsing raises if a line is not a record of its file."""
_MOST_REMEMBERED_BYTES = 1 << 16


@dataclass(frozen=True)
class NewRecords(Generic[Record]):
    """Records that were appended since the last call.

    Attributes:
        begins_anew: Whether the file was cut or replaced. Then `records` are all of its records, and earlier ones are
            void.
    """

    records: list[Record]
    begins_anew: bool
    num_damaged: int


@dataclass(frozen=True)
class OfStep(Generic[Content]):
    step: int
    content: Content


def by_step(records: Sequence[OfStep[Content]]) -> dict[int, list[Content]]:
    found: dict[int, list[Content]] = {}
    for record in records:
        found.setdefault(record.step, []).append(record.content)
    return found


class LineTail(Generic[Record]):
    """Reader of a growing file of lines, which returns new lines at each call.

    It leaves an incomplete last line for the next call. It notices if a resumed run cuts the file back to the
    checkpoint.

    Args:
        parse: Function that converts the JSON value of a line to a record, or raises one of `NO_RECORD`.
    """

    def __init__(self, path: Path, parse: Callable[[Any], Record]):
        self._path, self._parse = path, parse
        self._offset = 0
        self._last_bytes = b""

    def read(self) -> NewRecords[Record]:
        """Return the records that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return NewRecords([], False, 0)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from None

    def _read(self, file: BinaryIO) -> NewRecords[Record]:
        # The size alone does not show a cut, because the file may have grown beyond its former length since.
        file.seek(self._offset - len(self._last_bytes))
        begins_anew = file.read(len(self._last_bytes)) != self._last_bytes
        if begins_anew:
            self._offset, self._last_bytes = file.seek(0), b""
        records: list[Record] = []
        num_damaged = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._last_bytes = line[-_MOST_REMEMBERED_BYTES:]
            try:
                if line.strip():
                    records.append(self._parse(json.loads(line)))
            except NO_RECORD:
                num_damaged += 1
        return NewRecords(records, begins_anew, num_damaged)

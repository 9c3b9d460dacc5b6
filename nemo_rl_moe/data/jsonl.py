# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads JSON Lines: one JSON object a line, UTF-8."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from nemo_rl_moe.data.records import BadLine, RecordError
from nemo_rl_moe.errors import DataError

Parsed = TypeVar("Parsed")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def count_lines(path: Path) -> int:
    """Number of lines of a file, the last one with or without its newline.

    Raises:
        DataError: The file cannot be read.
    """
    count, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                count, last = count + block.count(b"\n"), block[-1:]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return count + (last != b"\n")


def read_jsonl(path: Path, parse: Callable[[object, str], Parsed]) -> Iterator[Parsed | BadLine]:
    """Yields, for each line in order, what it holds or what is wrong with it.

    Lines end at the newline byte only: JSON allows the other separators of Unicode inside a string.

    Args:
        path: The file.
        parse: Gets a decoded line and its `file:line`; raises `RecordError` for one that cannot be used.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            sample_id = f"{path}:{number}"
            try:
                record = _decode(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line)
                yield parse(record, sample_id)
            except RecordError as error:
                yield BadLine(sample_id, str(error))


def _decode(line: bytes) -> object:
    if not line.strip():
        raise RecordError("the line is empty")
    try:
        text = line.decode("utf-8").rstrip("\r\n")  # or a line that is cut short would end in column 1 of the next
    except UnicodeDecodeError as error:
        raise RecordError(f"not valid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RecordError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # a number with thousands of digits
        raise RecordError(f"not valid JSON: {error}") from None

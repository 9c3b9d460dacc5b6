# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens a path of the configuration, whatever kind of data it names."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from nemo_rl_moe.data.hub import load_table, read_table
from nemo_rl_moe.data.jsonl import count_lines, read_jsonl
from nemo_rl_moe.data.load_limit import noting_samples
from nemo_rl_moe.data.records import BadLine, Example, parse_record
from nemo_rl_moe.errors import DataError

EXAMPLE_COLUMNS = ("messages", "prompt", "completion")

Parsed = TypeVar("Parsed")
Parse = Callable[[object, str], Parsed]
ChooseColumns = Callable[[str, Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class LineSource(Generic[Parsed]):
    """Data that is about to be read.

    Attributes:
        name: What to call it in messages.
        num_lines: Lines or rows, good and bad.
        lines: What the lines hold, and the bad lines, in order; can be read once.
    """

    name: str
    num_lines: int
    lines: Iterator[Parsed | BadLine]


def open_source(path: str, split: str) -> LineSource[Example]:
    """Opens examples for supervised fine-tuning.

    Args:
        path: The file, folder or hub's name.
        split: The split to take; a `.jsonl` file has none and ignores it.

    Raises:
        DataError: There is nothing that can be read.
    """
    return open_lines(path, split, parse_record, _example_columns)


def open_lines(path: str, split: str, parse: Parse[Parsed], choose_columns: ChooseColumns) -> LineSource[Parsed]:
    """Opens a `.jsonl` file, or whatever `datasets` can load.

    Args:
        path: The file, folder or hub's name.
        split: The split to take; a `.jsonl` file has none and ignores it.
        parse: Gets a decoded line and where it is; raises `RecordError` for one that cannot be used.
        choose_columns: Gets the path and the columns of a table; returns those to read, or raises `DataError`.

    Raises:
        DataError: There is nothing that can be read.
    """
    parse = noting_samples(parse)
    if path.endswith(".jsonl"):
        return LineSource(path, count_lines(Path(path)), read_jsonl(Path(path), parse))
    table = load_table(path, split)
    table = table.select_columns(list(choose_columns(path, table.column_names)))
    return LineSource(f"{path}[{split}]", len(table), read_table(table, path, split, parse))


def _example_columns(path: str, names: Sequence[str]) -> list[str]:
    columns = [name for name in EXAMPLE_COLUMNS if name in names]
    if not columns:
        found = ", ".join(names) or "none"
        raise DataError(f"{path}: has neither messages nor prompt and completion; its columns: {found}")
    return columns

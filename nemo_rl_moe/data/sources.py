# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens a path of the configuration, whatever kind of data it names."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_moe.data.hub import load_table, read_table
from nemo_rl_moe.data.jsonl import count_lines, read_jsonl
from nemo_rl_moe.data.records import BadLine, Example


@dataclass(frozen=True)
class ExampleSource:
    """Data that is about to be read.

    Attributes:
        name: What to call it in messages.
        num_lines: Lines or rows, good and bad.
        lines: The examples and the bad lines, in order; can be read once.
    """

    name: str
    num_lines: int
    lines: Iterator[Example | BadLine]


def open_source(path: str, split: str) -> ExampleSource:
    """Opens a `.jsonl` file, or whatever `datasets` can load.

    Args:
        path: The file, folder or hub's name.
        split: The split to take; a `.jsonl` file has none and ignores it.

    Raises:
        DataError: There is nothing that can be read.
    """
    if path.endswith(".jsonl"):
        return ExampleSource(path, count_lines(Path(path)), read_jsonl(Path(path)))
    table = load_table(path, split)
    return ExampleSource(f"{path}[{split}]", len(table), read_table(table, path, split))

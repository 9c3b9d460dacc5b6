# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of measurements in docs/gpu.md, from the JSON lines of checks.

  python -m tests.gpu.table FOLDER/results.jsonl ... --write docs/gpu.md

Lines of CPUs and of checks that did not pass are left out. Rows of the page that the files do not have stay.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from nemo_rl_moe.atomic_writes import write_whole

HEADER = "| date | card | torch, engine | check | numbers |\n|---|---|---|---|---|\n"
NONE = "| none measured yet | | | | |\n"
_LEFT_OUT = ("losses", "losses_on_cpu", "errors", "message", "waits", "planned_held_bytes")
"""Lists and texts that a table has no room for."""
_WHOLE = 1000
"""From here on decimals say nothing."""


def rows(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a row for each passed result of a card, in the lines' order."""
    return [_row(line) for line in lines if line["status"] == "passed" and line["card"] not in (None, "CPU")]


def _row(line: Mapping[str, Any]) -> str:
    shown = {
        name: value for name, value in line["numbers"].items() if name not in _LEFT_OUT and value not in (None, {})
    }
    numbers = ", ".join(_cell(name, value) for name, value in shown.items())
    releases = f"{line['torch']}, {line['transformer_engine']}"
    return f"| {line['date']} | {line['card']} | {releases} | `{line['name']}` | {numbers} |\n"


def _cell(name: str, value: Any) -> str:
    """Return a number with its name, bytes in GB."""
    words = name.replace("bytes", "GB").replace("_", " ")
    if "bytes" in name:
        return f"{words} {value / 1e9:.2f}"
    if isinstance(value, float):
        return f"{words} {value:,.0f}" if value >= _WHOLE else f"{words} {value:.4g}"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value}"


def with_rows(page: str, found: Sequence[str]) -> str:
    """Return the page with these rows too, sorted, each once.

    Raises:
        ValueError: The page has no table of measurements.
    """
    before, header, behind = page.partition(HEADER)
    if not header:
        raise ValueError(f"there is no table that begins with {HEADER.splitlines()[0]}")
    table = list(takewhile(lambda line: line.startswith("|"), behind.splitlines(keepends=True)))
    rest = behind[len("".join(table)) :]
    present = sorted({*table, *found} - {NONE}, reverse=True)
    return before + header + ("".join(present) or NONE) + rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the rows or write them into a page; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page with that table; otherwise rows are printed")
    options = parser.parse_args(arguments)
    found = rows(json.loads(line) for path in options.results for line in path.read_text("utf-8").splitlines())
    if options.write is None:
        print("".join(found), end="")
    else:
        write_whole(options.write, with_rows(options.write.read_text("utf-8"), found))
        print(f"{options.write}: {len(found)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the page on GPUs calls proven is proven by tests that are there."""

import ast
import re
from pathlib import Path

import pytest

ROW = re.compile(r"^\| (?P<subject>.+) \| .+ \| `(?P<file>test_\w+\.py)::(?P<name>test_\w+)` \|$")


def rows_of(page: str) -> list[re.Match[str]]:
    table = page.partition("## Proven by\n")[2].partition("| subject | behaviour | proven by |\n|---|---|---|\n")[2]
    lines = table.partition("\n\n")[0].splitlines()
    found = [ROW.match(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if row is None]
    return [row for row in found if row is not None]


def missing(rows: list[re.Match[str]], tests: Path) -> list[str]:
    files = {row["file"] for row in rows}
    functions = {
        (path.name, node.name)
        for path in tests.rglob("test_*.py")
        if path.name in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    return [f"{row['file']}::{row['name']}" for row in rows if (row["file"], row["name"]) not in functions]


def test_what_is_called_proven_has_its_test(repository_root: Path) -> None:
    rows = rows_of((repository_root / "docs/gpu.md").read_text(encoding="utf-8"))
    assert len(rows) >= 43
    assert len({row["subject"] for row in rows}) == len(rows)
    assert missing(rows, repository_root / "tests") == []


def test_a_test_that_is_not_there_is_found(repository_root: Path) -> None:
    rows = rows_of(
        "## Proven by\n| subject | behaviour | proven by |\n|---|---|---|\n| a | b | `test_x.py::test_y` |\n"
    )
    assert missing(rows, repository_root / "tests") == ["test_x.py::test_y"]
    with pytest.raises(AssertionError, match="no proof"):
        rows_of("## Proven by\n| subject | behaviour | proven by |\n|---|---|---|\n| a | b | no proof |\n")

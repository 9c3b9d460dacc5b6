# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gallery of silent failures: its capture folders are what their script writes, and print what the page shows."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.runs.folder.capture_folder import read_description, read_step, steps_of
from tests.conftest import REPOSITORY_ROOT

FAULTS = REPOSITORY_ROOT / "examples" / "audit" / "faults"
PAGE = (REPOSITORY_ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"^```\nnemo-rl-moe audit (\S+)\n((?:error: .*\n)*)```$", PAGE, re.MULTILINE))
IN_NUMBERS = dict(re.findall(r"`nemo-rl-moe audit (\S+)` shows it in the row `([^`]+)`", PAGE))


def script() -> ModuleType:
    """`examples/audit/make_faults.py`, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_faults", FAULTS.parent / "make_faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_each_folder_is_on_the_page() -> None:
    folders = {f"examples/audit/faults/{path.name}" for path in FAULTS.iterdir()}
    assert SHOWN.keys() | IN_NUMBERS.keys() == folders == {f"examples/audit/faults/{name}" for name in script().FAULTS}


@pytest.mark.parametrize("path", SHOWN)
def test_the_page_shows_what_is_printed(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY_ROOT)
    expected = SHOWN[path]
    assert main(["audit", path]) == (1 if expected else 0)
    printed = capsys.readouterr().err
    assert [line for line in expected.splitlines() if line not in printed.splitlines()] == []
    assert bool(printed) == bool(expected)


@pytest.mark.parametrize("path", IN_NUMBERS)
def test_the_numbers_show_the_fault(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY_ROOT)
    main(["audit", path])
    (row, *_) = re.findall(rf"^  {IN_NUMBERS[path]} +(\S+) +(\S+)", capsys.readouterr().out, re.MULTILINE)
    first, last = map(float, row)
    assert abs(last - first) > 0.04


@pytest.mark.parametrize("name", ["healthy", "dropped_rows"])
def test_the_folders_are_what_the_script_writes(name: str, tmp_path: Path) -> None:
    script().write(tmp_path, name)
    description = read_description(tmp_path)
    assert description == read_description(FAULTS / name)
    kept, made = steps_of(FAULTS / name), steps_of(tmp_path)
    assert kept.keys() == made.keys()
    for step in kept:
        pairs = zip(read_step(description, step, kept[step]), read_step(description, step, made[step]), strict=True)
        for old, new in pairs:
            assert old.names == new.names
            for column in ("rollout_experts", "training_experts"):
                np.testing.assert_array_equal(old.columns[column], new.columns[column])

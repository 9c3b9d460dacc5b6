# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reproductions of Megatron-Core's silent errors print what their page shows, on the release that is installed."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY_ROOT

FOLDER = REPOSITORY_ROOT / "docs" / "upstream"
PAGE = (FOLDER / "index.md").read_text(encoding="utf-8")
SECTIONS = PAGE.split("\n## ")[1:]
SCRIPTS = sorted(FOLDER.glob("*.py"))
RELEASES = ("0.16.1", "0.19.2")


def section_of(script: Path) -> str:
    """Return the section of the page that links a script."""
    (section,) = (text for text in SECTIONS if f"({script.name})" in text)
    return section


def shown(script: Path) -> dict[str, str]:
    """Return the output of a script on the page, by release; releases that print the same share a block."""
    blocks = re.findall(r"^```\nmegatron-core (.+)\n((?:.*\n)*?)```$", section_of(script), re.MULTILINE)
    return {release: f"megatron-core {release}\n{text}" for names, text in blocks for release in names.split(", ")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_has_a_section_with_both_releases_and_a_test(script: Path) -> None:
    assert set(shown(script)) == set(RELEASES)
    ((file, name),) = re.findall(r"^- \*\*Test\*\*:\s+`(tests/\S+\.py)::(\w+)`\.$", section_of(script), re.MULTILINE)
    assert f"\ndef {name}(" in (REPOSITORY_ROOT / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_page_shows_what_is_printed(script: Path) -> None:
    ran = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == shown(script)[version("megatron-core")]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The reproductions of Megatron-Core's silent errors print what their pages show, on the release that is installed."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY_ROOT

FOLDER = REPOSITORY_ROOT / "docs" / "upstream"
SCRIPTS = sorted(FOLDER.glob("*.py"))
RELEASES = ("0.16.1", "0.19.2")


def shown(script: Path) -> dict[str, str]:
    """Output of a script on its page, by release."""
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    outputs = re.findall(r"^```\n(megatron-core (\S+)\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return {release: text for text, release in outputs}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_has_a_page_with_both_releases(script: Path) -> None:
    assert set(shown(script)) == set(RELEASES)
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert f"({script.stem}.md)" in index
    assert f"({script.name})" in script.with_suffix(".md").read_text(encoding="utf-8")


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

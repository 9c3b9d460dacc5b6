# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The three runs of the quickstart: their files and commands, and the output that the page shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY_ROOT
from tests.functional import sft_runs
from tests.unit.test_docs_examples import DOCS, blocks

PAGE = DOCS / "quickstart.md"
NUMBER = re.compile(r"\d+\.\d+")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run all commands below "Your data, your reward", and return their output."""
    folder = tmp_path_factory.mktemp("quickstart")
    for name, text in re.findall(r"^```\w+\n# (\w+\.(?:py|yaml))\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        (folder / name).write_text(text)
    (folder / "examples").symlink_to(REPOSITORY_ROOT / "examples")
    environment = sft_runs.environment() | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    section = PAGE.read_text().partition("## Your data, your reward")[2].partition("## Where to look")[0]
    commands = re.findall(r"^(?:nemo-rl-moe|python) .+$", section, re.M)
    assert [command.split()[1] for command in commands] == ["make_data.py", "data", "sft", "grpo", "evaluate"]
    output = ""
    for command in commands:
        done = subprocess.run(
            shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout
    return output


def test_the_runs_print_what_the_page_shows(printed: str) -> None:
    """Apart from numbers, which are other ones on another processor."""
    lines = {NUMBER.sub("N", line) for line in printed.splitlines()}
    shown = [text for text in blocks(PAGE, "") if "steps done" in text or "responses each" in text]
    shown = [text for text in shown if "30 steps done" not in text]  # the demo's
    assert len(shown) == 3
    for text in shown:
        assert [line for line in text.splitlines() if NUMBER.sub("N", line) not in lines] == []


def test_the_reward_teaches(printed: str) -> None:
    before, after = map(float, re.findall(r"validation accuracy: (\S+) -> (\S+)", printed)[-1])
    (evaluated,) = re.findall(r"^  accuracy +(\S+) ±", printed, re.M)
    assert before < 0.65
    assert after > before + 0.15
    assert float(evaluated) > before + 0.15

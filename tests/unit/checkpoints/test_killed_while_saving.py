# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that save without a pause are killed again and again: what was published is never lost and never cut."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_moe.checkpoints.store import CheckpointStore
from tests.conftest import REPOSITORY_ROOT
from tests.support.saving_runs import is_whole

NUM_KILLS = 25


@pytest.fixture
def saver(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Starts a run for each line that it gets; see `tests/support/saving_runs.py`."""
    command = [sys.executable, "-m", "tests.support.saving_runs", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY_ROOT)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY_ROOT, env=environment
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.full
def test_every_checkpoint_is_whole_whenever_a_run_is_killed(tmp_path: Path, saver: "subprocess.Popen[str]") -> None:
    generator = random.Random(6)
    warnings: list[str] = []
    store = CheckpointStore(tmp_path / "checkpoints", warnings.append)
    newest, num_cut_short = 0, 0
    for _ in range(NUM_KILLS):
        last_reported = run_and_kill(saver, store, generator.randint(1, 4), generator.uniform(0.0, 0.02))
        num_cut_short += any(entry.name.startswith(".step_") for entry in store.folder.iterdir())
        found = store.checkpoints()
        assert all(is_whole(checkpoint) for checkpoint in found)
        assert warnings == [], "no reader ever met half a checkpoint"
        assert found[-1].step >= last_reported > newest, "nothing is lost, and each run goes on from the one before"
        newest = found[-1].step
    assert num_cut_short > 0, "some of them were killed while they saved"


def run_and_kill(saver: "subprocess.Popen[str]", store: CheckpointStore, num_published: int, after_s: float) -> int:
    """Lets a run start, reads its checkpoints while it writes them, and kills it.

    Args:
        saver: Starts the run.
        store: Reads what the run writes.
        num_published: Checkpoints that the run publishes before that.
        after_s: Seconds from then to its end.

    Returns:
        The last step that the run said to have published.
    """
    assert saver.stdin is not None
    assert saver.stdout is not None
    print(file=saver.stdin, flush=True)
    process_id = int(saver.stdout.readline())
    reported = [saver.stdout.readline() for _ in range(num_published)]
    end = time.monotonic() + after_s
    while time.monotonic() < end:
        store.checkpoints()
    os.kill(process_id, signal.SIGKILL)
    while (line := saver.stdout.readline()) != "ended\n":
        reported.append(line)
    return max(int(line.removeprefix("step_")) for line in reported)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets that hang: a pipe that nobody fills, one that stops half way, a read that cannot be interrupted."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl_moe.data.sources import load_limit, open_lines, open_source
from nemo_rl_moe.errors import DataError

LINE = '{"prompt": "1+1", "completion": "2"}\n'


def problem_of(path: Path, limit_s: float = 0.3) -> str:
    with pytest.raises(DataError) as caught, load_limit(limit_s, str(path)):
        list(open_source(str(path), "train").lines)
    return str(caught.value)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(2 * LINE)
    with load_limit(30, str(path)):
        assert len(list(open_source(str(path), "train").lines)) == 2


def test_a_pipe_that_nobody_writes_to(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    os.mkfifo(path)
    assert problem_of(path) == (f"{path}: reading it took longer than data.load_timeout_s = 0.3 s; no sample was read")


def test_the_last_sample_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(3 * LINE)

    def hang_at_the_third(record: object, sample_id: str) -> object:
        del record
        if sample_id.endswith(":3"):
            time.sleep(60)
        return sample_id

    source = open_lines(str(path), "train", hang_at_the_third, lambda _, columns: columns)
    with pytest.raises(DataError, match=f"the last sample that was read is {path}:3"), load_limit(0.3, str(path)):
        list(source.lines)


def test_what_cannot_be_interrupted_ends_the_program() -> None:
    code = (
        "import signal, time; from nemo_rl_moe.data import sources as load_limit; load_limit.GRACE_S = 0.2\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "with load_limit.load_limit(0.1, 'a mount'): time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: a mount: reading it took longer than data.load_timeout_s = 0.1 s; no sample was read\n"
    )

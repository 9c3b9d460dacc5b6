# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets that hang, such as a pipe that nobody fills."""

import os
from pathlib import Path

import pytest

from nemo_rl_moe.data.sources import load_limit, open_source
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
    assert problem_of(path) == f"{path}: reading it took longer than data.load_timeout_s = 0.3 s"

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole lines only, and none lost while the disk is full."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_rl_moe.runs.folder import lines as line_file
from nemo_rl_moe.runs.folder.lines import LineFile
from nemo_rl_moe.runs.folder.metrics import JsonlLogger, read_metrics
from tests.support.clocks_and_disks import files_no_longer_than, fill


@pytest.fixture
def reported() -> list[str]:
    return []


def test_lines_wait_for_space_and_no_half_one_is_left(tmp_path: Path, reported: list[str]) -> None:
    lines = LineFile(tmp_path / "x.jsonl", reported.append, reported.append)
    lines.append(["a" * 9, "b" * 9])
    with files_no_longer_than(25):
        for letter in "cde":
            lines.append([letter * 9])
            assert (tmp_path / "x.jsonl").read_text() == "a" * 9 + "\n" + "b" * 9 + "\n"
    assert len(reported) == 1
    assert reported[0].startswith(
        "x.jsonl cannot be written, its lines are kept until it can be: [Errno 27] File too large"
    )
    lines.append(["f" * 9])
    lines.close()
    assert (tmp_path / "x.jsonl").read_text().split() == [letter * 9 for letter in "abcdef"]
    assert reported[1:] == ["x.jsonl can be written again"]


def test_what_never_gets_space_is_counted(tmp_path: Path, reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "_MOST_BYTES_KEPT", 30)
    lines = LineFile(tmp_path / "x.jsonl", reported.append, reported.append)
    with files_no_longer_than(0):
        for letter in "abcde":
            lines.append([letter * 9])
    lines.append([])
    assert (tmp_path / "x.jsonl").read_text().split() == [letter * 9 for letter in "cde"], "the newest are kept"
    with files_no_longer_than(31):
        lines.append(["f" * 9])
        lines.close()
    assert reported[-1] == "x.jsonl lacks 3 lines that could not be written"


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_file_that_somebody_removes_is_begun_anew(tmp_path: Path, reported: list[str], with_folder: bool) -> None:
    """A run that goes on in another folder than that of its checkpoints has nobody else who would make it again."""
    path = tmp_path / "run" / "x.jsonl"
    path.parent.mkdir()
    lines = LineFile(path, reported.append, reported.append)
    lines.append(["a"])
    path.unlink()
    if with_folder:
        path.parent.rmdir()
    lines.append(["b"])
    assert lines.flush_to_disk()
    lines.append(["c"])
    lines.close()
    assert path.read_text().split() == ["b", "c"]
    assert reported == [f"{path} was removed; it begins anew, without the earlier lines"]


def test_lines_wait_for_a_disk_that_is_gone(tmp_path: Path, reported: list[str]) -> None:
    path = tmp_path / "disk" / "run" / "x.jsonl"
    path.parent.mkdir(parents=True)
    lines = LineFile(path, reported.append, reported.append)
    lines.append(["a"])
    path.parent.parent.rename(tmp_path / "away")
    lines.append(["b"])
    assert not lines.flush_to_disk(), "a checkpoint is not to be published without the records of its steps"
    (tmp_path / "away").rename(path.parent.parent)
    lines.close()
    assert path.read_text().split() == ["a", "b"]


def test_flushing_reports_whether_the_disk_has_all(
    tmp_path: Path, reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    lines = LineFile(tmp_path / "x.jsonl", reported.append, reported.append)
    lines.append(["a"])
    assert lines.flush_to_disk()
    assert synced == [(tmp_path / "x.jsonl").stat().st_ino]
    with files_no_longer_than(2):
        lines.append(["b"])
        assert not lines.flush_to_disk()
    assert lines.flush_to_disk()
    assert (tmp_path / "x.jsonl").read_text() == "a\nb\n"
    monkeypatch.setattr(os, "fsync", broken_disk)
    assert not lines.flush_to_disk()


def test_flushing_while_another_thread_appends(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "x", pytest.fail, pytest.fail)
    with ThreadPoolExecutor(1) as other:
        flushed = [other.submit(lines.flush_to_disk) for _ in range(200)]
        for number in range(1000):
            lines.append([str(number)])
    assert all(future.result() for future in flushed)
    assert (tmp_path / "x").read_text().split() == [str(number) for number in range(1000)]


def broken_disk(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_metrics_on_a_file_system_that_fills_up(small_disk: Path, reported: list[str]) -> None:
    logger = JsonlLogger(small_disk, reported.append, reported.append)
    logger.log_step(1, {"train/loss": 1.0})
    filler = fill(small_disk)
    for step in range(2, 200):
        logger.log_step(step, {"train/loss": 1.0})
        assert (small_disk / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert len(reported) == 1
    assert "No space left on device" in reported[0]
    assert len(read_metrics(small_disk / "metrics.jsonl")) < 199
    filler.unlink()
    logger.log_step(200, {"train/loss": 1.0})
    logger.close()
    assert [record.step for record in read_metrics(small_disk / "metrics.jsonl")] == list(range(1, 201))


def test_lines_are_read_while_the_file_is_open(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "x", pytest.fail, pytest.fail)
    lines.append([json.dumps({"a": "\u2028"})])
    assert json.loads((tmp_path / "x").read_text("utf-8")) == {"a": "\u2028"}

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What was written after a step goes; what was written before it stays, whatever a kill interrupts."""

import json
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder import step_tables
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter, steps_of
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence
from nemo_rl_moe.runs.folder.expert_load import FOLDER_NAME, ExpertLoadWriter, read_expert_load
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from tests.support.clocks_and_disks import fill
from tests.support.quick_list import examples


def write_lines(path: Path, steps: list[int], torn: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "text": "\u2028"}) + "\n" for step in steps) + torn)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_load(folder: Path, steps: range, steps_of_a_file: int = 4) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_tables, "STEPS_OF_A_FILE", steps_of_a_file)
        writer = ExpertLoadWriter(folder, pytest.fail)
        for step in steps:
            writer.write(step, ExpertLoad((1,), torch.tensor([[step, 0]])))


def load_steps(folder: Path) -> list[int]:
    return read_expert_load(folder).steps.tolist()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "routing_anomalies.jsonl", "environment_failures.jsonl"]
)
@pytest.mark.parametrize("torn", ["", '{"step": 1, "te', "\0\0\0"])
@pytest.mark.parametrize(("step", "kept"), [(-1, 0), (0, 1), (2, 4), (3, 5), (9, 5)])
def test_lines(name: str, torn: str, step: int, kept: int, tmp_path: Path) -> None:
    steps = [0, 1, 2, 2, 3]
    write_lines(tmp_path / name, steps, torn)
    rewind_run_folder(tmp_path, step)
    assert steps_in(tmp_path / name) == steps[:kept]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["capture", "tape"])  # older name last
def test_captured_routes(name: str, tmp_path: Path) -> None:
    writer = CaptureFolderWriter(tmp_path / name, CaptureDescription((1,), 4, 2, "a test"))
    for step in (1, 2, 3):
        writer.write(step, [CapturedSequence("a", 2, {})])
    rewind_run_folder(tmp_path, 2)
    assert list(steps_of(tmp_path / name)) == [1, 2]


def test_what_is_no_record_stays_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\na note\n{"step": 2}\n{"step": 3}\nanother note\n')
    rewind_run_folder(tmp_path, 2)
    assert path.read_text() == '{"step": 1}\na note\n{"step": 2}\n'


def test_a_full_disk_is_no_obstacle(small_disk: Path) -> None:
    write_lines(small_disk / "metrics.jsonl", list(range(100)))
    write_load(small_disk, range(1, 12))
    fill(small_disk)
    rewind_run_folder(small_disk, 6)
    assert steps_in(small_disk / "metrics.jsonl") == list(range(7))
    assert load_steps(small_disk) == list(range(1, 7))


def make_read_only(mounted: Path) -> None:
    """Remounts it; a thread of pyarrow may hold a file that has been read for a moment longer."""
    for _ in range(50):
        done = subprocess.run(["mount", "-o", "remount,ro", str(mounted)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(done.stderr)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", FOLDER_NAME])
def test_a_file_that_cannot_be_cut_is_named(small_disk: Path, name: str) -> None:
    if name == FOLDER_NAME:
        write_load(small_disk, range(1, 5))
    else:
        write_lines(small_disk / name, [1, 2, 3])
    make_read_only(small_disk)
    with pytest.raises(CheckpointError) as caught:
        rewind_run_folder(small_disk, 2)
    assert caught.value.problems == [
        f"{small_disk / name}: cannot be rewound to step 2, from which the run resumes: Read-only file system; make"
        " room for it or make it writable, or move it away"
    ]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 14), st.integers(-1, 15), st.integers(0, 6))
def test_expert_load_goes_on_after_any_step(
    tmp_path_factory: pytest.TempPathFactory, last: int, step: int, further: int
) -> None:
    folder = tmp_path_factory.mktemp("load")
    write_load(folder, range(1, last + 1))
    rewind_run_folder(folder, step)
    kept = max(0, min(step, last))
    write_load(folder, range(kept + 1, kept + 1 + further))
    wanted = list(range(1, kept + further + 1))
    if wanted:
        assert load_steps(folder) == wanted
        assert sorted(pq.read_table(folder / FOLDER_NAME)["step"].to_pylist()[::2]) == wanted, "for other readers too"
    else:
        assert list((folder / FOLDER_NAME).iterdir()) == []


def test_a_kill_while_a_joined_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_load(tmp_path, range(1, 5))

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            rewind_run_folder(tmp_path, 2)
    assert load_steps(tmp_path) == [1, 2, 3, 4], "nothing twice"
    rewind_run_folder(tmp_path, 2)
    assert load_steps(tmp_path) == [1, 2]
    assert len(list((tmp_path / FOLDER_NAME).iterdir())) == 1


def test_a_file_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    write_load(tmp_path, range(1, 7))
    (tmp_path / FOLDER_NAME / "steps-00000001-00000004.parquet").write_bytes(b"")
    rewind_run_folder(tmp_path, 2)
    assert [path.name for path in (tmp_path / FOLDER_NAME).iterdir()] == [".steps-00000001-00000004.parquet.damaged"]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What was written after a step goes; what was written before it stays, whatever a kill interrupts."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.loggers import expert_load
from nemo_rl_moe.loggers.expert_load import FOLDER_NAME, ExpertLoadWriter, read_expert_load
from nemo_rl_moe.loggers.rewind import rewind_run_folder
from nemo_rl_moe.models.policy.interfaces import ExpertLoad


def write_lines(path: Path, steps: list[int], torn: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "text": "\u2028"}) + "\n" for step in steps) + torn)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_load(folder: Path, steps: range, steps_of_a_file: int = 4) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_load, "STEPS_OF_A_FILE", steps_of_a_file)
        writer = ExpertLoadWriter(folder, pytest.fail)
        for step in steps:
            writer.write(step, ExpertLoad((1,), torch.tensor([[step, 0]])))


def load_steps(folder: Path) -> list[int]:
    return read_expert_load(folder)["step"].to_pylist()[::2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("torn", ["", '{"step": 1, "te', "\0\0\0"])
@pytest.mark.parametrize(("step", "kept"), [(-1, 0), (0, 1), (2, 4), (3, 5), (9, 5)])
def test_lines(name: str, torn: str, step: int, kept: int, tmp_path: Path) -> None:
    steps = [0, 1, 2, 2, 3]
    write_lines(tmp_path / name, steps, torn)
    rewind_run_folder(tmp_path, step)
    assert steps_in(tmp_path / name) == steps[:kept]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_kill_before_the_new_file_is_in_place_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [1, 2, 3])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            rewind_run_folder(tmp_path, 1)
    assert steps_in(path) == [1, 2, 3]
    rewind_run_folder(tmp_path, 1)
    assert steps_in(path) == [1]
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=30, deadline=None)
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

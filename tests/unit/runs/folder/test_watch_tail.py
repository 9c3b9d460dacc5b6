# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadTail, ExpertLoadWriter, read_expert_load
from nemo_rl_moe.runs.folder.line_tail import NewRecords
from nemo_rl_moe.runs.folder.metrics import MetricsTail, StepRecord, parse_record
from nemo_rl_moe.runs.folder.step_tables import STEPS_OF_A_FILE
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder


def line_of(step: int, loss: float = 1.0) -> bytes:
    return json.dumps({"step": step, "time": step, "metrics": {"train/loss": loss}}).encode() + b"\n"


def steps_of(new: NewRecords[StepRecord]) -> list[int]:
    return [record.step for record in new.records]


def write_steps(folder: Path, steps: Iterable[int]) -> None:
    """Loads whose every count is the step."""
    writer = ExpertLoadWriter(folder, print)
    for step in steps:
        writer.write(step, ExpertLoad((0, 2), torch.full((2, 4), step)))
    writer.close()


def test_only_new_and_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == NewRecords([], False, 0)
    path.write_bytes(line_of(1) + line_of(2)[:-7])
    assert steps_of(tail.read()) == [1]
    assert steps_of(tail.read()) == []
    path.write_bytes(line_of(1) + line_of(2) + b"\n" + line_of(3))
    assert tail.read() == NewRecords([parse_record(line_of(step), "") for step in (2, 3)], False, 0)


@pytest.mark.parametrize("damaged", [b"{", b"[1]", b"\x00\xff\x1b[2J", b'{"step": "one", "time": 0, "metrics": {}}'])
def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line_of(1) + damaged + b"\n" + line_of(2))
    new = MetricsTail(path).read()
    assert (steps_of(new), new.num_damaged) == ([1, 2], 1)


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_bytes(b"".join(line_of(step) for step in range(1, 6)))
    tail.read()
    rewind_run_folder(tmp_path, 3)
    new = tail.read()
    assert (steps_of(new), new.begins_anew) == ([1, 2, 3], True)
    with path.open("ab") as file:
        file.write(line_of(4, 9.0))
    new = tail.read()
    assert (steps_of(new), new.begins_anew) == ([4], False)
    # Cut, and grown beyond its former length.
    path.write_bytes(line_of(1) + b"".join(line_of(step, 5.0) for step in range(2, 6)))
    new = tail.read()
    assert (steps_of(new), new.begins_anew) == ([1, 2, 3, 4, 5], True)


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_bytes(line_of(1))
    tail.read()
    (tmp_path / "other").write_bytes(line_of(7))
    path.unlink()
    assert tail.read() == NewRecords([], False, 0)
    (tmp_path / "other").rename(path)
    new = tail.read()
    assert (steps_of(new), new.begins_anew) == ([7], True)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        MetricsTail(tmp_path).read()


def test_only_new_steps_of_the_load_are_read(tmp_path: Path) -> None:
    tail = ExpertLoadTail(tmp_path)
    assert tail.read(9) is None
    write_steps(tmp_path, range(1, 4))
    found = tail.read(2)
    assert found is not None
    assert (found.steps.tolist(), found.layers.tolist(), found.counts[:, 1, 3].tolist()) == ([1, 2], [0, 2], [1, 2])
    assert tail.read(2) is None
    found = tail.read(9)
    assert found is not None
    assert found.steps.tolist() == [3]


def test_joined_files_bring_nothing_twice(tmp_path: Path) -> None:
    tail = ExpertLoadTail(tmp_path)
    write_steps(tmp_path, range(1, STEPS_OF_A_FILE))
    first = tail.read(STEPS_OF_A_FILE)
    write_steps(tmp_path, range(STEPS_OF_A_FILE, STEPS_OF_A_FILE + 2))
    assert len(list((tmp_path / "expert_load.parquet").iterdir())) == 2
    second = tail.read(STEPS_OF_A_FILE + 1)
    assert first is not None
    assert second is not None
    assert len(first.steps) == STEPS_OF_A_FILE - 1
    assert second.steps.tolist() == [STEPS_OF_A_FILE, STEPS_OF_A_FILE + 1]


def test_files_that_are_joined_while_they_are_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(tmp_path, range(1, STEPS_OF_A_FILE))
    read_table = pq.read_table

    def join_before_the_fourth(path: Path, **options: Any) -> pa.Table:
        if path.name == "steps-00000004-00000004.parquet":
            monkeypatch.undo()
            write_steps(tmp_path, [STEPS_OF_A_FILE])
        return read_table(path, **options)

    monkeypatch.setattr(pq, "read_table", join_before_the_fourth)
    assert read_expert_load(tmp_path).steps.tolist() == list(range(1, STEPS_OF_A_FILE + 1))


def test_behind_a_damaged_file_the_newest_step_is_read(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 6))
    (tmp_path / "expert_load.parquet" / "steps-00000002-00000002.parquet").write_bytes(b"PAR1")
    tail = ExpertLoadTail(tmp_path)
    found = tail.read(5)
    assert found is not None
    assert found.steps.tolist() == [5]
    (problem,) = tail.problems
    assert "steps-00000002-00000002.parquet: cannot be read" in problem
    write_steps(tmp_path, [6])
    (tmp_path / "expert_load.parquet" / "steps-00000006-00000006.parquet").write_bytes(b"PAR1")
    assert tail.read(6) is None
    write_steps(tmp_path, [7])
    found = tail.read(7)
    assert found is not None
    assert found.steps.tolist() == [7]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder import step_tables
from nemo_rl_moe.runs.folder.expert_load import FOLDER_NAME, ExpertLoadWriter, read_expert_load
from tests.support.clocks_and_disks import files_no_longer_than

LAYERS = (1, 3, 10)
EXPERTS = 4
COLUMNS = {"step": pa.int64(), "layer": pa.int32(), "expert": pa.int32(), "count": pa.int64()}


def load_of_step(step: int) -> ExpertLoad:
    counts = torch.arange(len(LAYERS) * EXPERTS).reshape(len(LAYERS), EXPERTS) + 1000 * step
    return ExpertLoad(LAYERS, counts)


def rows_of_steps(steps: range | list[int]) -> list[dict[str, int]]:
    return [
        {"step": step, "layer": layer, "expert": expert, "count": 1000 * step + row * EXPERTS + expert}
        for step in steps
        for row, layer in enumerate(LAYERS)
        for expert in range(EXPERTS)
    ]


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def writer(tmp_path: Path, warnings: list[str], messages: list[str]) -> ExpertLoadWriter:
    return ExpertLoadWriter(tmp_path, warnings.append, messages.append)


def write(writer: ExpertLoadWriter, steps: range | list[int]) -> None:
    for step in steps:
        writer.write(step, load_of_step(step))


def rows_read(run_folder: Path) -> list[dict[str, int]]:
    found = read_expert_load(run_folder)
    return [
        {"step": int(step), "layer": int(layer), "expert": expert, "count": int(count)}
        for step, of_step in zip(found.steps, found.counts, strict=True)
        for layer, of_layer in zip(found.layers, of_step, strict=True)
        for expert, count in enumerate(of_layer)
    ]


def file_names(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / FOLDER_NAME).iterdir())


def test_each_step_can_be_read_at_once(writer: ExpertLoadWriter, tmp_path: Path, warnings: list[str]) -> None:
    with pytest.raises(FileNotFoundError):
        read_expert_load(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, load_of_step(step))
        (path,) = (tmp_path / FOLDER_NAME).glob(f"steps-*-{step:08d}.parquet")
        schema = pq.read_table(path).schema
        assert dict(zip(schema.names, schema.types, strict=True)) == COLUMNS
        assert rows_read(tmp_path) == rows_of_steps(range(1, step + 1))
    assert warnings == []


def test_counts_beyond_32_bits(writer: ExpertLoadWriter, tmp_path: Path) -> None:
    writer.write(1, ExpertLoad((0,), torch.tensor([[2**40, 0]])))
    assert read_expert_load(tmp_path).counts.tolist() == [[[2**40, 0]]]


def test_other_tools_read_the_folder(writer: ExpertLoadWriter, tmp_path: Path) -> None:
    write(writer, range(1, 4))
    folder = tmp_path / FOLDER_NAME
    for rows in (
        pd.read_parquet(folder).to_dict("records"),
        pq.read_table(folder).to_pylist(),
        pyarrow.dataset.dataset(folder).to_table().to_pylist(),
    ):
        assert sorted(rows, key=lambda row: tuple(row.values())) == rows_of_steps(range(1, 4))


def test_many_steps_become_one_file(writer: ExpertLoadWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tables, "STEPS_OF_A_FILE", 3)
    steps = [1, 2, 5, 6, 7, 8, 9]
    write(writer, steps)
    assert file_names(tmp_path) == [
        "steps-00000001-00000005.parquet",
        "steps-00000006-00000008.parquet",
        "steps-00000009-00000009.parquet",
    ]
    assert rows_read(tmp_path) == rows_of_steps(steps)
    assert pd.read_parquet(tmp_path / FOLDER_NAME).shape == (len(rows_of_steps(steps)), 4)


def test_short_steps_share_a_file(tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(step_tables.time, "monotonic", lambda: now)
    monkeypatch.setattr(step_tables, "STEPS_OF_A_FILE", 5)
    writer = ExpertLoadWriter(tmp_path, warnings.append, max_delay_s=2.0)
    write(writer, [1, 2, 3])
    # The first one is there at once, for whoever looks whether it works.
    assert file_names(tmp_path) == ["steps-00000001-00000001.parquet"]
    now += 2
    write(writer, [4, 5])
    assert file_names(tmp_path) == ["steps-00000001-00000001.parquet", "steps-00000002-00000004.parquet"]
    assert rows_read(tmp_path) == rows_of_steps(range(1, 5))
    writer.flush()
    assert file_names(tmp_path) == ["steps-00000001-00000005.parquet"]
    write(writer, range(6, 13))
    writer.close()
    assert file_names(tmp_path)[1:] == ["steps-00000006-00000010.parquet", "steps-00000011-00000012.parquet"]
    assert rows_read(tmp_path) == rows_of_steps(range(1, 13))
    assert not warnings


@pytest.mark.parametrize("num_removed", [0, 1])
def test_a_crash_while_the_joined_files_are_removed(
    num_removed: int, writer: ExpertLoadWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_tables, "STEPS_OF_A_FILE", 3)
    unlink, removed = Path.unlink, []

    def killed_after_some(path: Path) -> None:
        if len(removed) == num_removed:
            raise KeyboardInterrupt
        removed.append(path)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", killed_after_some)
    with pytest.raises(KeyboardInterrupt):
        write(writer, range(1, 4))
    assert len(file_names(tmp_path)) == 4 - num_removed, "the joined file and single ones"
    assert rows_read(tmp_path) == rows_of_steps(range(1, 4)), "each row once"


def test_a_crash_while_a_file_is_written(
    writer: ExpertLoadWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(writer, [1])
    write_table = pq.write_table

    def killed_half_way(table: pa.Table, path: Path, **options: object) -> None:
        write_table(table, path, **options)
        path.write_bytes(path.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", killed_half_way)
    with pytest.raises(KeyboardInterrupt):
        write(writer, [2])
    assert len(file_names(tmp_path)) == 2, "the partial file is there"
    assert rows_read(tmp_path) == rows_of_steps([1])
    assert len(pd.read_parquet(tmp_path / FOLDER_NAME)) == len(rows_of_steps([1]))
    assert len(pyarrow.dataset.dataset(tmp_path / FOLDER_NAME).to_table()) == len(rows_of_steps([1]))


def test_what_is_no_file_of_steps_is_left_alone(writer: ExpertLoadWriter, tmp_path: Path) -> None:
    write(writer, [1])
    (tmp_path / FOLDER_NAME / "notes.txt").write_text("mine")
    (tmp_path / FOLDER_NAME / ".steps-00000002-00000002.parquet.incomplete").write_bytes(b"PAR1")
    assert rows_read(tmp_path) == rows_of_steps([1])


def test_what_cannot_be_written_waits(
    writer: ExpertLoadWriter, tmp_path: Path, warnings: list[str], messages: list[str]
) -> None:
    (tmp_path / FOLDER_NAME).write_text("a file is in the way")
    write(writer, range(1, 4))
    (warning,) = warnings
    assert warning.startswith(f"{FOLDER_NAME} cannot be written, its steps are kept until it can be: ")
    (tmp_path / FOLDER_NAME).unlink()
    write(writer, [4])
    assert messages == [f"{FOLDER_NAME} can be written again"]
    assert rows_read(tmp_path) == rows_of_steps(range(1, 5))
    writer.close()
    assert len(warnings) == 1


def test_a_full_disk_leaves_nothing_half_written(
    writer: ExpertLoadWriter, tmp_path: Path, warnings: list[str], messages: list[str]
) -> None:
    write(writer, [1])
    with files_no_longer_than(100):
        write(writer, [2, 3])
    assert len(warnings) == 1
    assert file_names(tmp_path) == ["steps-00000001-00000001.parquet"]
    writer.close()
    assert rows_read(tmp_path) == rows_of_steps([1, 2, 3])
    assert messages == [f"{FOLDER_NAME} can be written again"]


def test_what_never_gets_space_is_counted(
    writer: ExpertLoadWriter, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_tables, "_MOST_STEPS_KEPT", 2)
    with files_no_longer_than(100):
        write(writer, range(1, 5))
    write(writer, [5])
    writer.close()
    assert rows_read(tmp_path) == rows_of_steps([4, 5])
    assert warnings[1:] == [f"{FOLDER_NAME} lacks 3 steps that could not be written"]


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_files_that_cannot_be_joined_stay_as_they_are(
    damage: str, writer: ExpertLoadWriter, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_tables, "STEPS_OF_A_FILE", 3)
    write(writer, range(1, 3))
    first = tmp_path / FOLDER_NAME / "steps-00000001-00000001.parquet"
    first.write_bytes(b"PAR1")
    if damage == "gone":
        shutil.rmtree(tmp_path / FOLDER_NAME)
    write(writer, range(3, 10))
    (warning,) = warnings
    assert warning.startswith(f"{FOLDER_NAME}: the files of steps 1 to 3 cannot be joined: ")
    assert file_names(tmp_path)[-2:] == ["steps-00000004-00000006.parquet", "steps-00000007-00000009.parquet"]
    first.unlink(missing_ok=True)
    assert rows_read(tmp_path) == rows_of_steps(range(3 if damage == "gone" else 2, 10))


def table_of(rows: list[dict[str, int]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=pa.schema(COLUMNS))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.drop_columns(["count"]), "rows without a number"),
        (lambda table: table.slice(1), "its steps have different numbers of rows"),
        (lambda table: table.slice(0, 0), "its steps have different numbers of rows"),
        (lambda table: table.take(list(range(len(table)))[::-1]), "not in the order of steps, layers and experts"),
        (
            lambda table: table.set_column(0, "step", pa.array([7] * len(table))),
            "its steps have different numbers of rows",
        ),
        (lambda table: table.set_column(3, "count", pa.array([-1] * len(table))), "have negative counts"),
        (lambda table: table.filter(pa.compute.field("layer") == LAYERS[0]), "other layers or experts"),
    ],
)
def test_a_file_that_is_no_load_matrix_is_damaged(tmp_path, writer, change, reason):  # type: ignore[no-untyped-def]
    for step in (1, 2, 3):
        writer.write(step, load_of_step(step))
    path = tmp_path / FOLDER_NAME / "steps-00000002-00000002.parquet"
    pq.write_table(change(table_of(rows_of_steps([2]))), path)
    with pytest.raises(DataError, match=f"{path.name}: cannot be read: ") as caught:
        read_expert_load(tmp_path)
    assert reason in str(caught.value)


def test_a_small_file_of_very_many_rows_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tables, "_MOST_ROWS", 11)
    (tmp_path / FOLDER_NAME).mkdir()
    pq.write_table(table_of(rows_of_steps([1])), tmp_path / FOLDER_NAME / "steps-00000001-00000001.parquet")
    with pytest.raises(DataError, match="12 rows, expected at most 11"):
        read_expert_load(tmp_path)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Capture folders: what is written is read, by many writers at once, and what is wrong is named."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.capture_folder import (
    SCHEMA,
    CaptureFolderWriter,
    existing_capture,
    read_description,
    read_step,
    steps_of,
)
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedRows, CapturedSequence

DESCRIPTION = CaptureDescription((1, 3), 8, 2, "a test")


def sequence(name: str, length: int, seed: int = 0, *, without: tuple[str, ...] = ()) -> CapturedSequence:
    generator = np.random.default_rng((seed, length))
    experts = generator.random((length, 2, 8)).argsort(-1)[..., :2].astype(np.int16)
    columns = {
        "token_ids": np.arange(length),
        "loss_mask": np.arange(length) > 1,
        "rollout_experts": experts[:-1],
        "training_experts": experts,
        "rollout_logprobs": -generator.random(length).astype(np.float32),
        "margins": generator.random((length, 2)).astype(np.float32),
    }
    return CapturedSequence(name, length, {k: v for k, v in columns.items() if k not in without}, reward=float(length))


def read(folder: Path, step: int) -> list[CapturedRows]:
    return list(read_step(read_description(folder), step, steps_of(folder)[step]))


def test_writers_of_one_name_lose_nothing(tmp_path: Path) -> None:
    """A name that two have by mistake: neither writes over the other's files."""

    def write(writer: int) -> None:
        for number in range(10):
            CaptureFolderWriter(tmp_path, DESCRIPTION, "rank-0").write(1, [sequence(f"{writer} {number}", 3)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    names = [name for rows in read(tmp_path, 1) for name in rows.names]
    assert sorted(names) == sorted(f"{writer} {number}" for writer in range(8) for number in range(10))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_written_is_read(tmp_path: Path) -> None:
    given = [sequence("a", 3), sequence("b", 5)]
    CaptureFolderWriter(tmp_path / "capture", DESCRIPTION).write(7, given)
    assert read_description(tmp_path / "capture") == DESCRIPTION
    assert list(steps_of(tmp_path / "capture")) == [7]
    (rows,) = read(tmp_path / "capture", 7)
    assert rows.step == 7
    assert rows.names == ("a", "b")
    assert rows.lengths.tolist() == [3, 5]
    assert rows.rewards is not None
    assert rows.rewards.tolist() == [3.0, 5.0]
    for name, values in given[1].columns.items():
        expected = values
        if name == "rollout_experts":  # no engine feeds the last token
            expected = np.concatenate([values, np.full((1, 2, 2), -1)])
        np.testing.assert_array_equal(rows.columns[name][3:], expected)
    assert set(rows.columns) == set(given[0].columns)


def test_many_write_at_once_and_steps_stay_apart(tmp_path: Path) -> None:
    writers = [CaptureFolderWriter(tmp_path, DESCRIPTION) for _ in range(3)]
    for step in (1, 2):
        for number, writer in enumerate(writers):
            writer.write(step, [sequence(f"{step}-{number}", 4)])
    writers[0].write(2, [sequence("2-again", 4)])
    assert {step: len(files) for step, files in steps_of(tmp_path).items()} == {1: 3, 2: 4}
    names = [name for rows in read(tmp_path, 2) for name in rows.names]
    assert sorted(names) == ["2-0", "2-1", "2-2", "2-again"]


def test_a_column_that_one_sequence_lacks_is_left_out(tmp_path: Path) -> None:
    CaptureFolderWriter(tmp_path, DESCRIPTION).write(1, [sequence("a", 3), sequence("b", 4, without=("margins",))])
    (rows,) = read(tmp_path, 1)
    assert "margins" not in rows.columns
    assert "token_ids" in rows.columns


def test_a_step_is_read_a_few_sequences_at_a_time(tmp_path: Path) -> None:
    CaptureFolderWriter(tmp_path, DESCRIPTION).write(1, [sequence(str(n), 2 + n % 5) for n in range(150)])
    parts = read(tmp_path, 1)
    assert max(len(part.names) for part in parts) < 150
    assert [name for part in parts for name in part.names] == [str(n) for n in range(150)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rollout_experts": np.zeros((3, 1, 2), np.int16)}, "rollout_experts has the shape"),
        ({"token_ids": np.zeros(2)}, "token_ids has the shape"),
        ({"routes": np.zeros(3)}, "a capture has no column 'routes'"),
    ],
)
def test_columns_of_another_shape_are_refused(tmp_path: Path, columns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaptureFolderWriter(tmp_path, DESCRIPTION).write(1, [CapturedSequence("a", 3, columns)])
    assert steps_of(tmp_path) == {}


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    CaptureFolderWriter(tmp_path, DESCRIPTION)
    CaptureFolderWriter(tmp_path, CaptureDescription((1, 3), 8, 2, "somebody else"))
    with pytest.raises(DataError, match="holds a capture of another model"):
        CaptureFolderWriter(tmp_path, CaptureDescription((1, 3), 16, 2))


@pytest.mark.parametrize("change", [{"format": "other"}, {"version": 2}, {"layers": None}, {"topk": "x"}])
def test_a_description_that_is_none_is_reported(tmp_path: Path, change: dict[str, Any]) -> None:
    CaptureFolderWriter(tmp_path, DESCRIPTION)
    path = tmp_path / "capture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=r"capture\.json: no description of a capture"):
        read_description(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = CaptureFolderWriter(tmp_path, DESCRIPTION).write(1, [sequence("a", 3)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=path.name):
        read(tmp_path, 1)


def test_the_format_is_on_its_page(repository_root: Path) -> None:
    page = (repository_root / "docs" / "audit.md").read_text()
    assert [name for name in SCHEMA.names if f"`{name}`" not in page] == []


def test_a_folder_of_an_older_release_is_read(tmp_path: Path) -> None:
    CaptureFolderWriter(tmp_path, DESCRIPTION).write(7, [CapturedSequence("a", 2, {})])
    text = (tmp_path / "capture.json").read_text().replace("routing-capture", "routing-tape")  # older name
    (tmp_path / "tape.json").write_text(text)  # older name
    (tmp_path / "capture.json").unlink()
    assert read_description(tmp_path) == DESCRIPTION
    CaptureFolderWriter(tmp_path, DESCRIPTION)
    assert not (tmp_path / "capture.json").exists()


def test_a_run_of_an_older_release_goes_on_in_its_folder(tmp_path: Path) -> None:
    assert existing_capture(tmp_path) is None
    (tmp_path / "tape").mkdir()  # older name
    (tmp_path / "tape" / "tape.json").write_text("{}")  # older name
    assert existing_capture(tmp_path) == tmp_path / "tape"  # older name
    CaptureFolderWriter(tmp_path / "capture", DESCRIPTION)
    assert existing_capture(tmp_path) == tmp_path / "capture"

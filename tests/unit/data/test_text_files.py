# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values of files and tables come to a record as they stand there: no reader guesses a type."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value, load_dataset_builder

from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.sources import open_lines
from nemo_rl_moe.errors import DataError
from tests.unit.data.conftest import refused

pytestmark = pytest.mark.usefixtures("own_cache")


def read(path: Path | str, split: str = "train") -> list[Any]:
    """Read records with their places."""
    opened = open_lines(str(path), split, lambda row, place: (row, place), lambda _, names: names)
    lines = list(opened.lines)
    assert opened.num_lines == len(lines)
    return lines


def values(path: Path | str, key: str = "answer") -> list[Any]:
    return [line if isinstance(line, BadLine) else line[0][key] for line in read(path)]


ANSWERS = ["007", "0.50", "1", "12345678901234567890", "None", "NA", "True", "2024-01-05", "", 'a "b"\n, c']


def test_cells_of_a_table_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    quoted = ['"' + answer.replace('"', '""') + '"' for answer in ANSWERS]
    path.write_text("\ufeffprompt,answer\n" + "".join(f"1=,{answer}\n" for answer in quoted))
    assert values(path) == ANSWERS
    assert [place for _, place in read(path)] == [f"{path}:{line}" for line in range(2, 12)]


def test_a_row_of_another_length_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,answer\n1,2\n1,2,3,4\n\n1,"x\ny"\n1\n1,"2"3\n')
    found = values(path)
    assert [str(line) for line in found] == [
        "2",
        f"{path}:3: the row has 4 cells, expected 2, one for each column",
        f"{path}:4: the line is empty",
        "x\ny",
        f"{path}:7: the row has 1 cell, expected 2, one for each column",
        f"""{path}:8: not valid CSV: ',' expected after '"'""",
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no first line with the names of its columns"),
        ("a,b,a\n", "two columns are named 'a', expected different names"),
        (b"a\n\xff\n", "not valid UTF-8: byte 0xff at byte 3"),
    ],
)
def test_a_table_that_cannot_be_read(content: str | bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused(read, path) == [f"{path}: {problem}"]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_list(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(records, indent=1))


DAYS: list[dict[str, Any]] = [
    {"answer": "2024-01-05", "n": 1, "more": {"at": "1999-12-31"}},
    {"answer": "1999-12-31", "n": 0.5},
]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("d.jsonl", write_lines),
        ("d.json", write_lines),
        ("d.json", write_list),
        ("folder/train.jsonl", write_lines),
        ("folder/train.json", write_list),
    ],
)
def test_json_is_read_alike_in_every_form(name: str, write: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path, DAYS)
    found = read(path.parent if path.parent != tmp_path else path)
    # 1 stays a whole number beside 0.5, and a record has its own keys alone.
    assert repr([record for record, _ in found]) == repr(DAYS)
    assert [place for _, place in found] == [f"{path}:1", f"{path}:2"]


def test_shards_of_a_folder_are_read_in_order_and_its_splits_are_known(tmp_path: Path) -> None:
    for name, answer in (("train-1.csv", "002"), ("train-0.csv", "001"), ("test.csv", "003")):
        (tmp_path / name).write_text(f"answer\n{answer}\n")
    assert values(tmp_path) == ["001", "002"]
    assert read(tmp_path, "test") == [({"answer": "003"}, f"{tmp_path}/test.csv:2")]
    with pytest.raises(DataError, match="has no split 'tets'; its splits: train, test; did you mean test"):
        read(tmp_path, "tets")


def test_records_of_a_list_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"answer": 1}, {"answer": 1, "answer": 2}, {"answer": 3}]')
    found = values(path)
    assert (found[0], str(found[1]), found[2]) == (
        1,
        f"{path}:2: the key 'answer' occurs twice in an object, expected once",
        3,
    )
    for content, problem in (
        ('[{"a": 1},\n {"a": }]', f"{path}:2: not valid JSON: Expecting value at column 8"),
        ("[1 2]", f"{path}:1: not valid JSON: Expecting ',' delimiter at column 4"),
        ("[1,]", f"{path}:1: not valid JSON: Expecting value at column 4"),
        ("[1] 2", f"{path}:1: not valid JSON: Extra data at column 5"),
        ("[1", f"{path}:1: not valid JSON: Expecting ',' delimiter at column 3"),
        ("[" * 200_000, f"{path}: not valid JSON: nested too deeply"),
    ):
        path.write_text(content)
        assert refused(read, path) == [problem]


def test_labels_are_read_by_name_and_short_numbers_as_they_were_written(tmp_path: Path) -> None:
    label = ClassLabel(names=["negative", "positive"])
    features = Features({"answer": label, "votes": List(label), "info": {"label": label, "n": Value("int64")}})
    rows = {"answer": [0, 1, None], "votes": [[1, 0], [], [1]], "info": [{"label": 1, "n": 1}] * 3}
    Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "labels")
    assert [record for record, _ in read(tmp_path / "labels")] == [
        {"answer": "negative", "votes": ["positive", "negative"], "info": {"label": "positive", "n": 1}},
        {"answer": "positive", "votes": [], "info": {"label": "positive", "n": 1}},
        {"answer": None, "votes": ["positive"], "info": {"label": "positive", "n": 1}},
    ]
    pq.write_table(pa.table({"answer": pa.array([0.1, 2.3, None], pa.float32())}), tmp_path / "f.parquet")
    assert values(tmp_path / "f.parquet") == [0.1, 2.3, None]


def test_a_copy_from_the_hub_is_read_as_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache as the hub's library makes it, on a machine without a network."""
    from huggingface_hub import constants

    copy = tmp_path / "hub/datasets--some--set"
    files = copy / "snapshots/abc"
    files.mkdir(parents=True)
    (copy / "refs").mkdir()
    (copy / "refs/main").write_text("abc")
    (files / "train.csv").write_text("answer\n007\n")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert values("some/set") == ["007"]


def test_files_of_text_on_the_hub_are_copied_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train-0.csv").write_text("answer\n007\n")
    asked: list[Any] = []

    class Builder:
        name = "csv"

        class config:
            data_files = {"train": ["hf://datasets/some/set@abc/data/train-0.csv"]}  # noqa: RUF012

    def builder_of(name: str) -> Any:
        return Builder if name == "some/set" else load_dataset_builder(name)

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("datasets.load_dataset_builder", builder_of)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("nemo_rl_moe.models.hub.from_cache_alone", lambda: False)
    assert values("some/set") == ["007"]
    patterns = ["README.md", "data/train-0.csv"]
    assert asked == [("some/set", {"repo_type": "dataset", "revision": "abc", "allow_patterns": patterns})]


def test_a_table_of_the_cache_whose_types_were_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Dataset.from_dict({"answer": [7]})
    table.info.builder_name = "csv"
    monkeypatch.setattr("datasets.load_dataset", lambda path: DatasetDict({"train": table}))
    monkeypatch.setattr("nemo_rl_moe.data.sources.hub_text_files", lambda name: None)
    with pytest.raises(DataError, match="has values whose types were guessed from csv files"):
        read("some/set")

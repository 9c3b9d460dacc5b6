# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What `datasets` loads without a network: files, folders and saved datasets."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from nemo_rl_moe.data.records import BadLine, Example
from nemo_rl_moe.data.sources import open_lines, open_source
from tests.unit.data.conftest import refused

pytestmark = pytest.mark.usefixtures("own_cache")
ROWS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}], "id": 1},
    {"messages": [{"role": "user", "content": "a"}, {"role": "wrong", "content": "b", "name": None}], "id": 2},
]


def save(tmp_path, kind):
    table, folder = Dataset.from_list(ROWS), tmp_path / "set"
    folder.mkdir()
    if kind == "parquet file":
        table.to_parquet(folder / "rows.parquet")
        return str(folder / "rows.parquet")
    if kind == "parquet folder":
        table.to_parquet(folder / "train.parquet")
    elif kind == "saved splits":
        DatasetDict({"train": table}).save_to_disk(folder)
    else:
        table.save_to_disk(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["parquet file", "parquet folder", "saved splits", "saved table"])
def test_rows_are_read_and_named(tmp_path, kind):
    path = save(tmp_path, kind)
    source = open_source(path, "train")
    good, bad = source.lines
    assert source.num_lines == 2
    assert isinstance(good, Example)
    assert good.sample_id == f"{path}[train]:0"
    assert good.messages == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"})
    assert isinstance(bad, BadLine)
    assert str(bad).startswith(f"{path}[train]:1: messages[1].role is 'wrong'")


def test_unknown_split_names_the_nearest(tmp_path):
    path = save(tmp_path, "parquet folder")
    assert refused(open_source, path, "trian") == [
        f"{path}: has no split 'trian'; its splits: train; did you mean train?"
    ]


def test_columns_that_are_missing(tmp_path):
    Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "set")
    assert refused(open_source, str(tmp_path / "set"), "train") == [
        f"{tmp_path}/set: has neither messages nor prompt and completion; its columns: text;"
        " to use other keys, set data.messages_key, or data.prompt_key and data.completion_key"
    ]


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert refused(open_source, str(tmp_path / "a.txt"), "train") == [
        f"{tmp_path}/a.txt: got the suffix .txt, expected one of .jsonl, .json, .csv, .parquet, .arrow"
    ]


def test_what_datasets_cannot_load_is_one_line(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    (problem,) = refused(open_source, str(tmp_path / "a.parquet"), "train")
    assert problem.startswith(f"{tmp_path}/a.parquet: datasets cannot load it: ")
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([b"a", b"\xff\xfe", b"b"]).view(pa.string()), "not valid UTF-8: byte 0xff at byte 1 of a text"),
        (pa.array([1, 2**62, 2], pa.timestamp("us")), "the row cannot be read: "),
    ],
)
def test_a_row_that_python_has_no_values_for_is_a_bad_line(tmp_path, column, reason):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["1", "2", "3"], "completion": column}), path)
    source = open_lines(str(path), "train", lambda row, sample_id: (row, sample_id), lambda _, columns: columns)
    first, second, third = source.lines
    assert isinstance(second, BadLine)
    assert second.sample_id == f"{path}[train]:1"
    assert second.reason.startswith(reason)
    assert (first[0]["prompt"], first[1]) == ("1", f"{path}[train]:0")
    assert (third[0]["prompt"], third[1]) == ("3", f"{path}[train]:2")


def test_many_long_names_of_columns_are_cut(tmp_path):
    path = tmp_path / "a.parquet"
    Dataset.from_dict({f"{number}{'x' * 10_000}": [1] for number in range(30)}).to_parquet(path)
    (problem,) = refused(open_source, str(path), "train")
    assert f"its columns: 0{'x' * 59}... (10,001 characters), 1x" in problem
    assert " and 10 more; to use" in problem
    assert len(problem) < 3000
    assert len(problem) < 3000

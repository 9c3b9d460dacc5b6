# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Slices are read as indexing would cut them; what is written, the safetensors library reads."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nemo_rl_moe.models.safetensors_files import (
    TYPES,
    SafetensorsWriter,
    SliceReader,
    TensorHeader,
    file_names,
    index_of,
    split_into_files,
)
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder
from tests.support.quick_list import examples

DTYPES = st.sampled_from(list(TYPES.values()))


@st.composite
def shape_and_ranges(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    ranges = []
    for length in shape:
        start = draw(st.integers(0, length))
        ranges.append((start, draw(st.integers(start, length))))
    return shape, ranges


@settings(deadline=None, max_examples=examples(60))
@given(sampled=shape_and_ranges(), dtype=DTYPES, target_dtype=DTYPES, most_mapped_bytes=st.integers(1, 200))
def test_slices_are_those_of_indexing(
    sampled: tuple[list[int], list[tuple[int, int]]],
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    most_mapped_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shape, ranges = sampled
    folder = tmp_path_factory.mktemp("slices")
    whole = torch.randn(shape).to(dtype)
    save_file({"tensor": whole, "other": torch.zeros(3)}, folder / "model.safetensors")
    expected = whole[tuple(slice(*limits) for limits in ranges)]
    # A target with strides of its own, as a piece of a stacked or transposed parameter has.
    target = torch.full(expected.shape[::-1], 7.0, dtype=target_dtype).permute(*reversed(range(len(shape))))
    with SliceReader(SafetensorsFolder(folder), most_mapped_bytes) as reader:
        reader.read_into(target, "tensor", ranges)
        assert reader.dtype("tensor") is dtype
        assert reader.bytes_read == expected.nbytes
    assert torch.equal(target, expected.to(target_dtype))


def test_file_is_opened_anew_after_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def counting_open(path: Path, framework: str) -> object:
        opened.append(path)
        return safe_open(path, framework=framework)

    monkeypatch.setattr("nemo_rl_moe.models.safetensors_files.safe_open", counting_open)
    whole = torch.arange(64.0).reshape(8, 8)
    save_file({"tensor": whole}, tmp_path / "model.safetensors")
    target = torch.zeros(8, 2)
    # Two rows of 32 bytes at a time: what is mapped are whole rows.
    with SliceReader(SafetensorsFolder(tmp_path), 64) as reader:
        reader.read_into(target, "tensor", [(0, 8), (2, 4)])
    assert len(opened) == 4
    assert torch.equal(target, whole[:, 2:4])
    with SliceReader(SafetensorsFolder(tmp_path), 256) as reader:
        reader.read_into(target, "tensor", [(0, 8), (2, 4)])
    assert len(opened) == 5


def writer_of(folder: Path, *shape: int) -> SafetensorsWriter:
    return SafetensorsWriter(folder, {"model.safetensors": [TensorHeader("tensor", shape, torch.float32)]})


def headers(*sizes: int) -> list[TensorHeader]:
    return [TensorHeader(f"tensor.{number}", (size,), torch.uint8) for number, size in enumerate(sizes)]


def test_files_are_filled_one_after_another() -> None:
    files = split_into_files(headers(4, 4, 4, 20, 1, 1), 10)
    assert [[tensor.num_bytes for tensor in held] for held in files] == [[4, 4], [4], [20], [1, 1]]
    assert split_into_files([], 10) == []


def test_names_of_files() -> None:
    assert file_names(1) == ["model.safetensors"]
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert file_names(0) == []


def test_index_counts_bytes_and_parameters() -> None:
    files = {
        "b.safetensors": [TensorHeader("x", (2, 3), torch.bfloat16)],
        "a.safetensors": [TensorHeader("y", (5,), torch.float32)],
    }
    assert index_of(files) == {
        "metadata": {"total_parameters": 11, "total_size": 32},
        "weight_map": {"x": "b.safetensors", "y": "a.safetensors"},
    }


@settings(deadline=None, max_examples=examples(40))
@given(
    tensors=st.lists(st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=3), DTYPES), min_size=1, max_size=6),
    max_bytes=st.integers(1, 300),
)
def test_what_is_written_is_read_back(
    tensors: list[tuple[list[int], torch.dtype]], max_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors.sort(key=lambda of_shape: -of_shape[1].itemsize)
    content = {f"tensor.{number}": torch.randn(shape).to(dtype) for number, (shape, dtype) in enumerate(tensors)}
    parts = split_into_files(
        (TensorHeader(name, tuple(tensor.shape), tensor.dtype) for name, tensor in content.items()), max_bytes
    )
    files = dict(zip(file_names(len(parts)), parts, strict=True))
    writer = SafetensorsWriter(folder, files)
    for tensor in content.values():
        for part in tensor:  # a tensor may come in parts
            assert not writer.is_complete
            writer.write(part)
    assert writer.is_complete
    writer.close()
    found = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(files)))
    assert SafetensorsFolder(folder).tensors.keys() == content.keys()


def test_transposed_tensor_is_written_as_it_is_indexed(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    writer_of(tmp_path, 3, 2).write(tensor)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["tensor"], tensor)


def test_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileExistsError):
        writer_of(tmp_path, 1).write(torch.zeros(1))

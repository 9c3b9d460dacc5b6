# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders from anywhere: what they hold is known from headers, and each damage is one clear line."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.safetensors_folder import (
    INDEX_FILE,
    MOST_LISTED,
    SafetensorsFolder,
    StoredTensor,
    listed,
    shown,
)
from tests.support.hf_folders import DAMAGED, tiny_tensors, write_folder
from tests.support.tiny_model import tiny_hf_config


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_one_line_that_names_it(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_folder(tiny_tensors(tiny_hf_config()), folder)
    SafetensorsFolder(folder)
    do, words = DAMAGED[damage]
    do(folder)
    with pytest.raises(ConfigurationError) as caught:
        SafetensorsFolder(folder)
    (line,) = caught.value.problems
    assert line.startswith(f"policy.model_name: {folder}: ")
    assert "\n" not in line
    for word in words:
        assert word in line


def test_tensors_are_those_of_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    tensors = {f"tensor.{number}": torch.ones(number, 3) for number in range(1, 7)}
    write_folder(tensors, folder)
    save_file({"tensor.1": torch.zeros(9)}, folder / "consolidated.safetensors")
    found = SafetensorsFolder(folder)
    assert found.tensors["tensor.3"] == StoredTensor("model-00002-of-00003.safetensors", (3, 3), "F32")
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert not found.without_entry


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_one_file_needs_no_index(name: str, tmp_path: Path) -> None:
    save_file({"tensor": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / name)
    assert SafetensorsFolder(tmp_path).tensors == {"tensor": StoredTensor(name, (2,), "BF16")}


def test_file_of_the_usual_name_is_taken_among_others(tmp_path: Path) -> None:
    save_file({"tensor": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert SafetensorsFolder(tmp_path).tensors.keys() == {"tensor"}


def test_files_may_be_links_as_in_the_hub_s_cache(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    write_folder({"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}, blobs)
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    assert SafetensorsFolder(folder).tensors.keys() == {"a", "b", "c"}


def test_folder_that_is_not_there_and_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        SafetensorsFolder(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"holds no \*.safetensors file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", [INDEX_FILE, "model.safetensors"])
def test_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigurationError, match=f"{name}: no plain file"):
        SafetensorsFolder(tmp_path)


def test_index_without_end_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / INDEX_FILE).open("wb") as file:
        file.truncate(2**27 + 1)
    with pytest.raises(ConfigurationError, match="larger than 128 MiB"):
        SafetensorsFolder(tmp_path)


def test_fingerprint_is_of_what_the_folder_holds(tmp_path: Path) -> None:
    for name, rows in (("first", 2), ("same", 2), ("other", 3)):
        write_folder({"a": torch.ones(rows), "b": torch.ones(1), "c": torch.ones(1)}, tmp_path / name)
    first, same, other = (SafetensorsFolder(tmp_path / name).fingerprint for name in ("first", "same", "other"))
    assert first == same
    assert first != other


def test_names_out_of_a_file_stay_on_one_line() -> None:
    assert shown("model.norm.weight") == "model.norm.weight"
    assert shown("two\nlines") == r"'two\nlines'"
    assert shown("") == "''"
    assert len(shown("x" * 10_000)) == 200
    assert listed(["a"] * (MOST_LISTED + 2)).endswith("a, a and 2 more")


def test_all_damaged_files_are_reported_at_once(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.ones(4) for number in range(4)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    (tmp_path / "t0.safetensors").write_bytes((tmp_path / "t0.safetensors").read_bytes()[:-3])
    (tmp_path / "t2.safetensors").unlink()
    with pytest.raises(ConfigurationError) as caught:
        SafetensorsFolder(tmp_path)
    assert [problem.split(": ")[2] for problem in caught.value.problems] == ["t0.safetensors", "t2.safetensors"]

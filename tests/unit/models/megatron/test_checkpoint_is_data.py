# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Code planted in a checkpoint's files is never run, and damage is reported: one error that names the file."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.serialization
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from nemo_rl_moe.checksums import INVENTORY_FILE_NAME
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.megatron.checkpoint.index import DataOnlyReader, check_folder, parse_index
from tests.support.checkpoint_run import problems_of_loading, save_once
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import tiny_policy
from tests.support.training_run import RunSettings

Damage = Callable[[Path, Path], None]
INDEX, COMMON, FORMAT, DATA = ".metadata", "common.pt", "metadata.json", "__0_0.distcp"


class MakesFolder:
    """What an attacker would write: unpickling it makes a folder."""

    def __init__(self, mark: Path):
        self._mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._mark,)


@pytest.fixture(scope="module")
def settings() -> RunSettings:
    return RunSettings(tiny_policy(1))


@pytest.fixture(scope="module")
def saved(settings: RunSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("saved")
    assert run_ranks(save_once, 1, settings, str(folder)) == [None]
    return folder


def read_index(folder: Path) -> Metadata:
    return parse_index((folder / INDEX).read_bytes())


def write_index(folder: Path, index: Any) -> None:
    (folder / INDEX).write_bytes(pickle.dumps(index))


def plant_in_index(folder: Path, mark: Path) -> None:
    write_index(folder, MakesFolder(mark))


def plant_inside_the_index(folder: Path, mark: Path) -> None:
    index = read_index(folder)
    index.planner_data = MakesFolder(mark)
    write_index(folder, index)


def plant_in_common(folder: Path, mark: Path) -> None:
    torch.save({"x": MakesFolder(mark)}, folder / COMMON)


def plant_in_every_tensor(folder: Path, mark: Path) -> None:
    """Data files hold tensors one after another, each as torch saves it; the index says where each one begins."""
    index = read_index(folder)
    content = io.BytesIO()
    torch.save(MakesFolder(mark), content)
    planted = content.getvalue()
    (folder / DATA).write_bytes(planted)
    for place in index.storage_data.values():
        place.offset, place.length = 0, len(planted)
    write_index(folder, index)


def plant_as_an_object(folder: Path, mark: Path) -> None:
    """Objects beside tensors are what Megatron-Core unpickles without any restriction."""
    plant_in_every_tensor(folder, mark)
    index = read_index(folder)
    name = next(iter(index.state_dict_metadata))
    index.state_dict_metadata[name] = BytesStorageMetadata()
    write_index(folder, index)


def cut(name: str, share: float) -> Damage:
    def damage(folder: Path, mark: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return damage


def plant_in_format(folder: Path, mark: Path) -> None:
    (folder / FORMAT).write_bytes(pickle.dumps(MakesFolder(mark)))


def ask_for_another_format(folder: Path, mark: Path) -> None:
    """Megatron-Core imports what reads a format by its name."""
    (folder / FORMAT).write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))


def keep_something_in_common(folder: Path, mark: Path) -> None:
    """Write a file whose content is merged into what is restored."""
    torch.save({"model": {}}, folder / COMMON)


def forget(name: str) -> Damage:
    return lambda folder, mark: (folder / name).unlink()


PLANTED: dict[str, tuple[Damage, str]] = {
    "index": (plant_in_index, "posix.mkdir"),
    "inside the index": (plant_inside_the_index, "posix.mkdir"),
    "common": (plant_in_common, "tensors"),
    "format": (plant_in_format, "no JSON"),
    "another format": (ask_for_another_format, "torch_dist"),
    "something in common": (keep_something_in_common, "empty dictionary"),
    "every tensor": (plant_in_every_tensor, "tensors"),
    "object": (plant_as_an_object, "pickled object"),
}
DAMAGED: dict[str, tuple[Damage, str]] = {
    "cut data": (cut(DATA, 0.5), f"{DATA}: damaged"),
    "cut index": (cut(INDEX, 0.1), INDEX),
    "no index": (forget(INDEX), "No such file"),
    "no data": (forget(DATA), f"{DATA}: cannot be read"),
    "no common": (forget(COMMON), f"{COMMON}: cannot be read"),
    "no format": (forget(FORMAT), f"{FORMAT}: cannot be read"),
}


def broken_copies(saved: Path, tmp_path: Path, damages: dict[str, tuple[Damage, str]]) -> dict[str, Path]:
    copies = {}
    for number, (name, (damage, _)) in enumerate(damages.items()):
        copies[name] = shutil.copytree(saved, tmp_path / f"copy_{number}")
        damage(copies[name], tmp_path / "mark")
        # Who plants something changes the checksums too; and earlier releases wrote none.
        (copies[name] / INVENTORY_FILE_NAME).unlink()
    return copies


def assert_named(problems: list[str], copies: dict[str, Path], damages: dict[str, tuple[Damage, str]]) -> None:
    for (name, folder), problem in zip(copies.items(), problems, strict=True):
        assert str(folder) in problem, name
        assert damages[name][1] in problem, (name, problem)
        assert "\n" not in problem


@pytest.mark.parametrize("variable", [pytest.param(None, marks=pytest.mark.full), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_planted_code_is_refused_and_never_run(
    variable: str | None, settings: RunSettings, saved: Path, tmp_path: Path
) -> None:
    copies = broken_copies(saved, tmp_path, PLANTED)
    folders = [*map(str, copies.values()), str(saved)]
    (problems,) = run_ranks(problems_of_loading, 1, settings, folders, variable)
    assert not (tmp_path / "mark").exists(), "code has run"
    assert_named(problems[:-1], copies, PLANTED)
    assert problems[-1] == "loaded", "an honest one is still read"


def test_the_plants_would_have_worked(saved: Path, tmp_path: Path) -> None:
    """Otherwise the test above would say nothing."""
    mark = tmp_path / "mark"
    copies = broken_copies(saved, tmp_path, {"index": PLANTED["index"]})
    pickle.loads((copies["index"] / INDEX).read_bytes())  # noqa: S301  (the attack itself)
    assert mark.is_dir()
    mark.rmdir()
    plant_in_common(tmp_path, mark)
    torch.load(tmp_path / COMMON, weights_only=False)
    assert mark.is_dir()


def test_damage_is_reported(settings: RunSettings, saved: Path, tmp_path: Path) -> None:
    copies = broken_copies(saved, tmp_path, DAMAGED)
    (problems,) = run_ranks(problems_of_loading, 1, settings, [str(folder) for folder in copies.values()])
    assert_named(problems, copies, DAMAGED)


def test_another_model_is_reported(saved: Path) -> None:
    for model, word in (({"hidden_size": 64}, "shape"), ({"num_hidden_layers": 5}, "layers.4")):
        other = RunSettings(tiny_policy(1), model=model)
        ((problem,),) = run_ranks(problems_of_loading, 1, other, [str(saved)])
        assert word in problem, problem


def test_an_optimizer_that_was_not_saved_is_reported(settings: RunSettings, tmp_path: Path) -> None:
    assert run_ranks(save_once, 1, settings, str(tmp_path), False) == [None]
    ((problem,),) = run_ranks(problems_of_loading, 1, settings, [str(tmp_path)])
    assert "checkpointing.save_optimizer" in problem


@pytest.mark.full
def test_every_rank_s_damage_ends_all_ranks(tmp_path: Path) -> None:
    """A data file that only one rank reads: the others must not wait for it."""
    settings = RunSettings(tiny_policy(2, expert_model_parallel_size=2))
    assert run_ranks(save_once, 2, settings, str(tmp_path)) == [None, None]
    path = tmp_path / "__1_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)
    found = run_ranks(problems_of_loading, 2, settings, [str(tmp_path)])
    assert found[0] == found[1]
    assert f"{path}: damaged in " in found[0][0]
    (tmp_path / INVENTORY_FILE_NAME).unlink()  # as of an earlier release
    found = run_ranks(problems_of_loading, 2, settings, [str(tmp_path)])
    assert all("cannot be loaded" in problem for (problem,) in found)


def test_the_reader_goes_by_the_index_that_was_checked(saved: Path) -> None:
    index, _ = check_folder(saved)
    assert DataOnlyReader(saved, index, None).read_metadata() is index


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(torch.float32)])
def test_what_is_no_index(content: bytes, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: (damaged|refused)"):
        check_folder(folder)

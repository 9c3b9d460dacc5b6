# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Files and folders that appear whole or not at all."""

from pathlib import Path

import pytest

from nemo_rl_moe.atomic_writes import delete, put_in_place, write_whole
from tests.support.clocks_and_disks import files_no_longer_than


def test_a_full_disk_leaves_the_earlier_file_and_is_reported_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_whole(path, "earlier")
    with files_no_longer_than(100), pytest.raises(OSError, match="File too large") as caught:
        write_whole(path, "x" * 1000)
    assert caught.value.filename == str(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    assert path.read_text() == "earlier"


def staged(folder: Path) -> Path:
    """A folder to be put in place."""
    staging = folder / "model.incomplete"
    (staging / "inner").mkdir(parents=True)
    (staging / "inner" / "new").touch()
    return staging


def test_folder_gets_its_name(tmp_path: Path) -> None:
    put_in_place(staged(tmp_path), tmp_path / "model", tmp_path / "model.replaced")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "model",
        "model/inner",
        "model/inner/new",
    ]


@pytest.mark.parametrize("is_link", [False, True])
def test_one_that_was_there_is_replaced(is_link: bool, tmp_path: Path) -> None:
    earlier = tmp_path / "elsewhere" if is_link else tmp_path / "model"
    earlier.mkdir()
    (earlier / "earlier").touch()
    if is_link:
        (tmp_path / "model").symlink_to(earlier)
    (tmp_path / "model.replaced").mkdir()  # left by a crash
    put_in_place(staged(tmp_path), tmp_path / "model", tmp_path / "model.replaced")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["inner"]
    assert not (tmp_path / "model.replaced").exists()
    # Where a link led is another's.
    assert not is_link or (earlier / "earlier").exists()


def test_on_failure_the_earlier_one_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "earlier").touch()
    staging = staged(tmp_path)
    rename = Path.rename

    def failing(self: Path, other: Path) -> Path:
        if self == staging:
            raise OSError("the disk is gone")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        put_in_place(staging, target, tmp_path / "model.replaced")
    assert (target / "earlier").exists()
    assert not (tmp_path / "model.replaced").exists()


def test_delete_takes_files_links_and_folders(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("file", "link", "nothing"):
        delete(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    delete(tmp_path / "kept")
    assert not list(tmp_path.iterdir())

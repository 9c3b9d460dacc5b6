# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What can go wrong on one rank is reported by all of them: none waits for it, and training goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.checksums import Part, checksum_of, read_inventory, write_inventory
from tests.support.checkpoint_run import (
    problem_of_a_rank_s_folder,
    problems_of_saving,
    save_once,
    save_with_an_index_that_cannot_be_written,
    train_from_weights,
)
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import tiny_policy
from tests.support.training_run import RunSettings

SETTINGS = RunSettings(tiny_policy(2))
FULL = Path("/dev/full")


def fill_disk_of_last_rank(folder: Path) -> None:
    (folder / "__1_0.distcp").symlink_to(FULL)


def fill_disk_of_all_ranks(folder: Path) -> None:
    for name in ("common.pt", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).symlink_to(FULL)


def fill_disk_for_the_index(folder: Path) -> None:
    (folder / ".metadata.tmp").symlink_to(FULL)


def be_in_the_way_of_the_index(folder: Path) -> None:
    (folder / ".metadata").mkdir()


def be_in_the_way_of_the_format(folder: Path) -> None:
    (folder / "metadata.json").mkdir()


OBSTACLES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (fill_disk_of_last_rank, ("rank 1: ",)),
    (fill_disk_of_all_ranks, ("rank 0: ", "rank 1: ")),
    (fill_disk_for_the_index, ("rank 0: ", "No space left")),
    (be_in_the_way_of_the_index, ("rank 0: ", ".metadata")),
    (be_in_the_way_of_the_format, ("rank 0: ", "metadata.json")),
]


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def saved(folder: Path, settings: RunSettings = SETTINGS, with_optimizer: bool = True) -> Path:
    assert run_ranks(save_once, 2, settings, str(new_folder(folder)), with_optimizer) == [None, None]
    return folder


def problems_of_both(*folders: Path, largest_file: int | None = None) -> list[str]:
    """What both ranks say of saving into each folder."""
    first, second = run_ranks(problems_of_saving, 2, SETTINGS, [[str(folder)] * 2 for folder in folders], largest_file)
    assert first == second
    return list(first)


def test_a_checkpoint_that_cannot_be_written_is_reported_by_all_ranks_and_the_next_one_is_whole(tmp_path: Path) -> None:
    folders = []
    for number, (put_in_the_way, _) in enumerate(OBSTACLES):
        folders.append(new_folder(tmp_path / f"step_{number}"))
        put_in_the_way(folders[-1])
    with_room = new_folder(tmp_path / "with_room")
    *problems, last = problems_of_both(*folders, with_room)
    for problem, (_, words) in zip(problems, OBSTACLES, strict=True):
        assert all(word in problem for word in words), problem
        assert "\n" not in problem
    assert last == "saved"
    assert run_ranks(problem_of_a_rank_s_folder, 2, SETTINGS, [str(with_room)] * 2) == ["loaded"] * 2


@pytest.mark.full
def test_a_disk_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    problem, last = problems_of_both(new_folder(small_disk / "step"), new_folder(tmp_path / "step"))
    assert "rank 0: " in problem
    assert last == "saved"


@pytest.mark.full
def test_a_file_that_may_not_grow_on_one_rank(tmp_path: Path) -> None:
    folders = [new_folder(tmp_path / name) for name in ("limited", "free")]
    problem, last = problems_of_both(*folders, largest_file=50_000)
    assert problem.startswith("rank 1: ")
    assert last == "saved"


def test_any_error_of_the_first_rank_reaches_the_others(tmp_path: Path) -> None:
    first, last = run_ranks(save_with_an_index_that_cannot_be_written, 2, SETTINGS, str(tmp_path))
    assert first == last
    assert "pickle" in first


def test_ranks_that_do_not_share_the_folder_save_nothing(tmp_path: Path) -> None:
    own, other, missing = new_folder(tmp_path / "own"), new_folder(tmp_path / "other"), tmp_path / "missing"
    found = run_ranks(problems_of_saving, 2, SETTINGS, [[str(own), str(other)], [str(own), str(missing)]])
    assert found[0] == found[1]
    assert "that rank 1 has written; all ranks must share the folder" in found[0][0]
    assert found[0][1].startswith(f"rank 1: there is no folder {missing}")
    assert not missing.exists()
    assert not (own / ".metadata").exists()


@pytest.mark.full
def test_ranks_that_do_not_share_the_folder_load_nothing(tmp_path: Path) -> None:
    first_folder, stranger = saved(tmp_path / "saved"), saved(tmp_path / "stranger")
    half = shutil.copytree(first_folder, tmp_path / "half")
    (half / "__0_0.distcp").unlink()
    for second, words in (
        (tmp_path / "missing", "on rank 1; every rank must reach the folder"),
        (half, "__0_0.distcp: cannot be read"),
        (stranger, "rank 1 finds another checkpoint than rank 0"),
    ):
        first, last = run_ranks(problem_of_a_rank_s_folder, 2, SETTINGS, [str(first_folder), str(second)])
        assert first.replace(str(first_folder), str(second)) == last.replace(str(first_folder), str(second))
        assert words in first


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, full({"precision": "bfloat16"})], ids=["float32", "bfloat16"])
def test_a_damaged_checkpoint_leaves_no_trace_in_the_one_that_is_taken_instead(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Weights alone: nothing but the optimizer's own state could keep what was read of the damaged one."""
    settings = RunSettings(tiny_policy(2, **changes))
    damaged, weights = saved(tmp_path / "damaged", settings), saved(tmp_path / "weights", settings, False)
    names = []
    for name, entry in read_inventory(damaged).items():
        start = 0
        for part in entry.parts:
            if part.name.startswith("optimizer.state.exp_avg"):
                # The numbers lie in the middle of what torch writes of a tensor.
                with (damaged / name).open("r+b") as file:
                    file.seek(start + part.num_bytes // 2)
                    file.write(b"\x00\x00\x80\x3f")
                names.append(part.name)
            start += part.num_bytes
    assert names
    expected = run_ranks(train_from_weights, 2, settings, str(weights), None)
    found = run_ranks(train_from_weights, 2, settings, str(weights), str(damaged))
    for problems, steps in found:
        assert problems
        assert all(": damaged in optimizer.state.exp_avg" in problem for problem in problems)
        assert steps == expected[0][1]


@pytest.mark.full
def test_what_is_listed_otherwise_than_it_is_read_is_compared_too(tmp_path: Path) -> None:
    """A list whose parts are other stretches than the tensors: two tensors in each."""
    settings = RunSettings(tiny_policy(2))
    damaged, weights = saved(tmp_path / "damaged", settings), saved(tmp_path / "weights", settings, False)
    pairs: dict[str, list[Part]] = {}
    for name, entry in read_inventory(damaged).items():
        content = (damaged / name).read_bytes()
        start = 0
        for index in range(0, len(entry.parts), 2):
            end = start + sum(part.num_bytes for part in entry.parts[index : index + 2])
            pair = Part(entry.parts[index].name, end - start, checksum_of(content[start:end]))
            pairs.setdefault(name, []).append(pair)
            start = end
    write_inventory(damaged, pairs)
    expected = run_ranks(train_from_weights, 2, settings, str(weights), None)
    name, parts = next(iter(pairs.items()))
    with (damaged / name).open("r+b") as file:
        file.seek(parts[0].num_bytes // 2)
        (old,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old ^ 1]))
    for problems, steps in run_ranks(train_from_weights, 2, settings, str(weights), str(damaged)):
        assert [problem.partition(": ")[2].partition(":")[0] for problem in problems] == [f"damaged in {parts[0].name}"]
        assert steps == expected[0][1]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: whole ones are found, leftovers of a crash are cleared, two runs do not meet."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.checkpoints.store import CheckpointStore
from nemo_rl_moe.errors import CheckpointError
from tests.support.saving_runs import Run, is_whole

KEEP_ALL = "checkpointing.keep_top_k=null"


def refuse(path: Path) -> None:
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    """A run that has saved three times."""
    run = make_run(KEEP_ALL)
    for step in (2, 10, 9):
        run.save(step)
    return run


def test_checkpoints_are_found_in_the_order_of_their_steps(run: Run) -> None:
    assert run.steps() == [2, 9, 10]
    assert run.newest().step == 10
    assert all(is_whole(checkpoint) for checkpoint in run.store.checkpoints())
    assert CheckpointStore(run.store.folder / "not_there").checkpoints() == []


def test_other_things_in_the_folder_are_left_alone(run: Run) -> None:
    others = ["final", "step_", "step_01", "step_-1", "step_x", ".step_3.other", "step_4.bak", ".step_07.incomplete"]
    for name in others:
        (run.store.folder / name).mkdir()
    (run.store.folder / "step_11").write_text("a file")
    assert run.steps() == [2, 9, 10]
    run.store.sweep()
    assert all((run.store.folder / name).is_dir() for name in others)
    assert run.warnings == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "state.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "state.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "policy").rename(folder / "elsewhere"), "holds no folder policy"),
        (lambda folder: (folder / "policy" / "shard_0.bin").unlink(), "policy/shard_0.bin: is missing"),
        (lambda folder: os.truncate(folder / "policy" / "shard_1.bin", 99), "got 99 bytes, expected 10032"),
        (lambda folder: (folder / "files.json").unlink(), "files.json: cannot be read"),
        (
            lambda folder: (folder / "files.json").write_text('{"state.json": "1"}'),
            "files.json: damaged: algorithm: Field required",
        ),
        (lambda folder: folder.rename(folder.with_name("step_12")), "loop.step: got 10, expected 12"),
    ],
)
def test_a_damaged_one_is_reported_once_and_the_one_before_is_used(
    run: Run, damage: Callable[[Path], object], reason: str
) -> None:
    damage(run.newest().folder)
    assert run.newest().step == 9
    assert run.newest().step == 9
    (warning,) = run.warnings
    assert "is damaged and is not used" in warning
    assert reason in warning
    assert str(run.store.folder / "step_1") in warning


def test_leftovers_of_a_crash_are_swept(run: Run) -> None:
    for name in (".step_11.incomplete", ".step_2.removed", ".step_9.replaced"):
        (run.store.folder / name / "policy").mkdir(parents=True)
        (run.store.folder / name / "policy" / "shard").write_text("x")
    run.store.sweep()
    assert sorted(entry.name for entry in run.store.folder.iterdir()) == ["step_10", "step_2", "step_9"]


def test_a_crash_while_one_takes_the_place_of_another_loses_neither(run: Run) -> None:
    run.store.path_of(10).rename(run.store.folder / ".step_10.replaced")
    assert run.newest().step == 9
    run.store.sweep()
    assert run.newest().step == 10


def test_the_same_step_again_takes_the_place_of_the_first(run: Run) -> None:
    before = run.newest().state.time
    run.save(11)
    run.save(10)
    assert run.store.checkpoints()[-2].state.time > before
    assert run.steps() == [2, 9, 10, 11]


def test_what_cannot_be_deleted_does_not_make_a_published_one_a_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.newest().state.time
    delete = shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda path: refuse(path) if path.name.endswith(".replaced") else delete(path)
    )
    run.save(11)
    run.save(10)
    assert run.warnings == []
    assert run.store.checkpoints()[-2].state.time > before
    monkeypatch.undo()
    run.store.sweep()
    assert sorted(entry.name for entry in run.store.folder.iterdir()) == ["step_10", "step_11", "step_2", "step_9"]


def test_staging_again_begins_with_an_empty_folder(run: Run) -> None:
    (run.store.stage(12) / "half").write_text("x")
    assert list(run.store.stage(12).iterdir()) == []
    assert run.newest().step == 10
    run.store.discard(12)
    assert not (run.store.folder / ".step_12.incomplete").exists()


def test_a_checkpoint_appears_by_one_renaming(run: Run) -> None:
    staging = run.store.stage(12)
    (staging / "policy").mkdir()
    folder = staging.stat().st_ino
    assert run.store.publish(12).stat().st_ino == folder
    assert not staging.exists()


def test_a_leftover_that_cannot_be_cleared_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.store.folder / ".step_12.incomplete").mkdir()
    (run.store.folder / ".step_13.incomplete").mkdir()

    monkeypatch.setattr(shutil, "rmtree", refuse)
    run.store.sweep()
    assert len(run.warnings) == 2
    assert all(warning.endswith("cannot be cleared away: Directory not empty") for warning in run.warnings)
    assert run.steps() == [2, 9, 10]


def test_removal(run: Run) -> None:
    run.store.remove(10)
    assert run.steps() == [2, 9]
    assert sorted(entry.name for entry in run.store.folder.iterdir()) == ["step_2", "step_9"]


def test_two_runs_do_not_write_to_one_folder(run: Run) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from nemo_rl_moe.checkpoints.store import CheckpointStore\n"
        "with CheckpointStore(Path(sys.argv[1])).locked():\n"
        "    print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", hold, run.store.folder], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match="another run is writing to"), run.store.locked():
            pass
    finally:
        other.kill()
        other.wait()
    with run.store.locked():  # a killed run holds nothing
        pass


def test_a_folder_made_for_the_lock_goes_with_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "results" / "sft")
    with store.locked(), pytest.raises(CheckpointError, match="another run"), CheckpointStore(store.folder).locked():
        pass
    assert not (tmp_path / "results").exists()
    with store.locked():
        store.stage(5)
    assert (store.folder / ".step_5.incomplete").is_dir()
    with store.locked():
        pass
    assert store.folder.is_dir(), "it was there before"


def test_runs_that_come_and_go_at_the_same_time_never_share_the_lock(tmp_path: Path) -> None:
    """Each takes the folder away with the lock, under the others' hands."""
    code = (
        "import os, sys; from pathlib import Path; from nemo_rl_moe.checkpoints.store import CheckpointStore\n"
        "from nemo_rl_moe.errors import CheckpointError\n"
        "folder, inside, entered = Path(sys.argv[1], 'results', 'sft'), Path(sys.argv[1], 'inside'), 0\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for attempt in range(400):\n"
        "    try:\n"
        "        with CheckpointStore(folder).locked():\n"
        "            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))\n"
        "            entered += 1; inside.unlink()\n"
        "    except CheckpointError as error: assert 'another run' in str(error), error\n"
        "print(entered)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    others = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    said = []
    for other in others:
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.flush()
    for other in others:
        output, errors = other.communicate(timeout=280)
        assert other.returncode == 0, errors
        said.append(int(output))
    assert min(said) > 0, "each of them came in at times"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "x")
    with pytest.raises(CheckpointError, match=r"checkpointing.checkpoint_dir: '.*/x' cannot hold"), store.locked():
        pass

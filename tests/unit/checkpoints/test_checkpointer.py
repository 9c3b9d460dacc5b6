# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Saving beside the training, keeping the best, and saves that fail."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_rl_moe.checkpoints.best_metric import choice_in_force
from nemo_rl_moe.checkpoints.resume import ResumePoint
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.errors import CheckpointError, CheckpointSaveError
from tests.support.clocks_and_disks import file_system_of, files_no_longer_than
from tests.support.saving_runs import Run, ThreadedWriter, is_whole

MakeRun = Callable[..., Run]
C = "checkpointing"


@pytest.mark.parametrize(("period", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_when_a_checkpoint_is_due(make_run: MakeRun, period: int, due: list[int]) -> None:
    checkpointer = make_run(f"{C}.save_period={period}").checkpointer
    assert [step for step in range(1, 7) if checkpointer.is_due(step)] == due


def test_training_goes_on_while_a_checkpoint_is_written(make_run: MakeRun) -> None:
    may_write = threading.Event()
    run = make_run(may_write=may_write)
    run.checkpointer.start(LoopState(step=1), {})
    for _ in range(3):
        run.checkpointer.poll()
    assert (run.steps(), run.checkpointer.last_published) == ([], None)
    may_write.set()
    run.checkpointer.finish()
    assert (run.steps(), run.checkpointer.last_published) == ([1], run.store.path_of(1))
    assert run.messages == [f"checkpoint of step 1: {run.store.path_of(1)}"]
    assert is_whole(run.newest())


def test_a_checkpoint_that_is_due_waits_for_the_last_one(make_run: MakeRun) -> None:
    may_write = threading.Event()
    run = make_run(may_write=may_write)
    run.checkpointer.start(LoopState(step=1), {})
    threading.Timer(0.2, may_write.set).start()
    run.checkpointer.start(LoopState(step=2), {})
    run.checkpointer.start(LoopState(step=2), {})  # the end of the run, where the last step was saved already
    run.checkpointer.finish()
    assert run.steps() == [1, 2]
    assert run.policy.with_optimizer == [True, True]


def test_a_checkpoint_is_whole_when_all_models_are_written(make_run: MakeRun) -> None:
    may_write = threading.Event()
    run = make_run(beside={"critic": ThreadedWriter(may_write=may_write)})
    run.checkpointer.start(LoopState(step=1), {})
    time.sleep(0.05)
    run.checkpointer.poll()
    assert run.steps() == []
    may_write.set()
    run.checkpointer.finish()
    assert run.steps() == [1]
    assert is_whole(run.newest())
    folder = run.store.path_of(1)
    assert sorted(path.name for path in (folder / "critic" / "policy").iterdir()) == ["shard_0.bin", "shard_1.bin"]
    point = ResumePoint(folder, run.newest().state, None)
    assert [point.state_folder(role) for role in ("policy", "critic")] == [folder / "policy", folder / "critic/policy"]
    with pytest.raises(CheckpointError, match="holds no state of the role teacher, which this run trains; set"):
        point.state_folder("teacher")
    (folder / "critic" / "policy" / "shard_0.bin").write_bytes(b"")
    assert run.steps() == [], "torn"


def test_a_checkpoint_is_given_up_where_one_of_the_models_cannot_be_written(make_run: MakeRun) -> None:
    critic = ThreadedWriter()
    run = make_run(beside={"critic": critic})
    critic.fails_with = "no space"
    run.save(1)
    assert run.steps() == []
    assert run.warnings == [
        "the checkpoint of step 1 could not be saved: role critic: no space; there is none yet; training goes on"
    ]
    critic.fails_with = None
    run.save(2)
    assert run.steps() == [2]


def test_the_best_and_the_newest_are_kept(make_run: MakeRun) -> None:
    run = make_run(f"{C}.keep_top_k=2", f"{C}.save_optimizer=false")
    for step, accuracy in [(1, 0.5), (2, 0.9), (3, 0.4), (4, 0.8), (5, float("nan")), (6, 0.1)]:
        run.save(step, {"val/accuracy": accuracy, "train/loss": -accuracy})
    run.save(7, {"train/loss": -9.0})  # not validated
    assert run.steps() == [2, 4, 7]
    assert run.policy.with_optimizer == [False] * 7
    assert run.newest().state.with_optimizer is False
    assert run.warnings == []
    lowest = make_run(f"{C}.keep_top_k=1", f"{C}.metric_name=train:loss", f"{C}.higher_is_better=false")
    lowest.save(8, {"train/loss": 3.0})
    # Those of another metric rank below.
    assert lowest.steps() == [8]


def test_a_metric_that_is_not_there_is_reported_once(make_run: MakeRun) -> None:
    run = make_run(f"{C}.metric_name=val:acuracy")
    run.save(1, {"train/loss": 1.0})
    assert run.warnings == []
    for step in (2, 3):
        run.save(step, {"val/accuracy": 0.5, "val/loss": 1.0})
    assert run.warnings == [
        "checkpointing.metric_name: val:acuracy is not among the metrics of step 2, so that its checkpoint ranks below"
        " those that have it; did you mean val:accuracy?"
    ]


def test_a_save_that_no_validation_follows_is_reported_when_the_run_starts_and_not_again(make_run: MakeRun) -> None:
    run = make_run(f"{C}.save_period=5")
    for step in (3, 5, 10):
        run.save(step, {"train/loss": 1.0})
    assert run.warnings == []


def test_a_run_without_validation_keeps_the_newest(make_run: MakeRun) -> None:
    validated = make_run(f"{C}.keep_top_k=1")
    for step in (1, 2):
        validated.save(step, {"val/accuracy": 1.0 / step})
    assert validated.steps() == [1, 2]
    settings = validated.config.checkpointing
    assert choice_in_force(settings, "val:accuracy", validates=True).metric_name == "val:accuracy"
    chosen = choice_in_force(settings, "val:accuracy", validates=False)
    assert (settings.metric_name, chosen.metric_name) == ("auto", None)
    assert choice_in_force(settings, "train:loss", validates=False).metric_name == "train:loss"
    # The best of an earlier run with validation is no better than the newest of one without.
    without = make_run(f"{C}.keep_top_k=1", f"{C}.metric_name={chosen.metric_name or 'null'}")
    without.save(3)
    assert without.steps() == [3]


def test_a_checkpoint_without_the_records_of_its_steps_is_given_up(make_run: MakeRun) -> None:
    run = make_run()
    run.records_are_on_disk = False
    run.save(1)
    reason = "could not be saved: the records of its steps (metrics.jsonl) cannot be written"
    assert [warning.split(";")[0] for warning in run.warnings] == [f"the checkpoint of step 1 {reason}"]
    assert run.steps() == []
    run.records_are_on_disk = True
    run.save(2)
    assert run.steps() == [2]
    assert 0 < run.checkpointer.longest_save_s < 60
    run.records_are_on_disk = False
    run.save(3)
    with pytest.raises(CheckpointSaveError, match="checkpoint of step 3 could not be saved: the records"):
        run.checkpointer.finish()
    assert sorted(entry.name for entry in run.store.folder.iterdir()) == ["step_2"]


def test_any_error_of_who_writes_further_state_costs_the_checkpoint_alone(make_run: MakeRun) -> None:
    def write_more(folder: Path) -> None:
        raise ValueError("surrogates not allowed")

    run = make_run()
    run.save(1)
    run.checkpointer.start(LoopState(step=2, batches_taken=2), {}, write_more)
    run.checkpointer.poll(wait=True)
    reason = "could not be saved: ValueError: surrogates not allowed"
    assert [warning.split(";")[0] for warning in run.warnings] == [f"the checkpoint of step 2 {reason}"]
    run.save(3)
    assert sorted(entry.name for entry in run.store.folder.iterdir()) == ["step_1", "step_3"]


def test_closing_leaves_no_thread_at_work(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, may_sync, syncing = make_run(), threading.Event(), threading.Event()

    def slow_sync(descriptor: int) -> None:
        syncing.set()
        may_sync.wait(60)

    monkeypatch.setattr(os, "fsync", slow_sync)
    run.checkpointer.start(LoopState(step=1), {})
    while not syncing.wait(0.01):
        run.checkpointer.poll()
    run.checkpointer.close(0.05)
    assert run.warnings == [f"{run.store.folder}: gave up waiting for the disk after 0.05 s"]
    may_sync.set()
    run.checkpointer.close(60)
    assert len(run.warnings) == 1
    assert run.steps() == [1]


def test_a_new_run_removes_the_checkpoints_of_an_earlier_one(make_run: MakeRun) -> None:
    earlier = make_run(f"{C}.keep_top_k=null")
    for step in (10, 20, 30):
        earlier.save(step, {"val/accuracy": 1.0})
    new = make_run(run_id="run-b", first_run_id="run-b")
    new.save(10, {"val/accuracy": 0.1})
    assert [checkpoint.state.run_id for checkpoint in new.store.checkpoints()] == ["run-b"]
    resumed = make_run(run_id="run-c", first_run_id="run-b")
    assert resumed.checkpointer.last_published == new.store.path_of(10)
    assert make_run(run_id="run-d", first_run_id="run-d").checkpointer.last_published is None
    resumed.save(20)
    assert resumed.steps() == [10, 20]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with file_system_of("1m", tmp_path / "disk") as folder:
        yield folder


def test_a_full_disk_leaves_the_earlier_checkpoint_and_gives_the_space_back(
    make_run: MakeRun, small_disk: Path
) -> None:
    run = make_run(f"{C}.checkpoint_dir={small_disk}", shard_bytes=200_000)
    run.save(1)
    run.policy.shard_bytes = 400_000
    run.save(2)
    good = run.store.path_of(1)
    reason = f"the checkpoint of step 2 could not be saved: No space left on device; the last good one is {good}"
    assert run.warnings == [f"{reason}; training goes on"]
    assert run.steps() == [1]
    assert is_whole(run.newest())
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["step_1"]
    with pytest.raises(CheckpointSaveError, match="step 2 could not be saved: No space left") as caught:
        run.checkpointer.finish()
    assert caught.value.exit_code == 1


def test_after_a_failed_save_the_next_one_works(make_run: MakeRun, small_disk: Path) -> None:
    run = make_run(f"{C}.checkpoint_dir={small_disk}", f"{C}.keep_top_k=1", shard_bytes=600_000)
    run.save(1)
    run.policy.shard_bytes = 200_000
    run.save(2)
    run.checkpointer.finish()
    assert run.steps() == [2]
    assert len(run.warnings) == 1
    assert "there is none yet" in run.warnings[0]


def test_no_room_for_the_state_file(make_run: MakeRun) -> None:
    run = make_run()
    run.save(1)
    with files_no_longer_than(100):
        run.save(2)
    assert run.steps() == [1]
    (warning,) = run.warnings
    assert warning.startswith("the checkpoint of step 2 could not be saved: File too large; the last good one is")
    assert run.policy.with_optimizer == [True], "nothing was asked of the policy"


def test_a_folder_that_has_gone(make_run: MakeRun) -> None:
    run = make_run()
    run.save(1)
    run.checkpointer.start(LoopState(step=2), {})
    run.store.folder.rename(run.store.folder.with_name("elsewhere"))
    run.store.folder.write_text("a file in its place")
    run.checkpointer.poll(wait=True)
    assert len(run.warnings) >= 1
    assert run.warnings[0].startswith("the checkpoint of step 2 could not be saved: ")
    with pytest.raises(CheckpointSaveError):
        run.checkpointer.finish()

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run goes on in the folder of the run before only where that is surely its own: others' metrics are never cut."""

import json
import shutil

import pytest

from tests.support.saving_runs import Place, saved

NEW_FOLDER = "this run writes its metrics to a new folder"


def test_a_copied_checkpoint_leaves_the_original_run_as_it_is(place: Place) -> None:
    saved(place.run(3, shared=True), 10)
    branch = place.folder / "branch"
    shutil.copytree(place.folder / "shared" / "step_10", branch / "step_10")
    point = place.found(f"checkpointing.checkpoint_dir={branch}")
    assert (point.step, point.run_folder) == (10, None)
    assert place.warnings == [
        f"{branch}/step_10 is a copy: the folder of its run, {place.run_folder(3)}, stays unchanged, and {NEW_FOLDER}",
    ]
    assert place.found(shared=True).run_folder == place.run_folder(3)


def test_a_link_to_the_folder_is_the_folder(place: Place) -> None:
    saved(place.run(3, shared=True), 10)
    (place.folder / "link").symlink_to(place.folder / "shared")
    assert place.found(f"checkpointing.checkpoint_dir={place.folder}/link").run_folder == place.run_folder(3)


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_another_run_has_taken_is_not_written_to(place: Place, shared: bool) -> None:
    saved(place.run(3, shared=shared), 10)
    (place.run_folder(3) / "run.json").write_text(json.dumps({"run_id": "another"}))
    assert place.found(shared=shared).run_folder is None
    assert NEW_FOLDER in place.warnings[0]


def test_a_new_folder_of_a_history_is_found_again(place: Place) -> None:
    later = place.run(4, shared=True, run_id="c", first_run_id="a")
    (place.run_folder(4) / "run.json").write_text(json.dumps({"run_id": "b"}))  # b has made it, c has gone on in it
    saved(later, 20)
    assert place.found(shared=True).run_folder == place.run_folder(4)


def test_a_run_folder_that_was_copied_or_moved(place: Place) -> None:
    saved(place.run(3), 10)
    shutil.copytree(place.run_folder(3), place.run_folder(4))
    assert place.found().run_folder is None, "its runs at services are those of the original"
    assert "is a copy" in place.warnings[0]
    shutil.rmtree(place.run_folder(3))
    assert place.found().run_folder == place.run_folder(4)
    assert place.warnings == []


def test_a_run_that_goes_on_from_a_copy_keeps_its_new_folder(place: Place) -> None:
    saved(place.run(3), 10)
    shutil.copytree(place.run_folder(3), place.run_folder(4))
    beside = place.run(5)
    (place.run_folder(5) / "run.json").write_text(json.dumps({"run_id": "new"}))
    beside.store.folder = place.run_folder(4) / "checkpoints"
    saved(beside, 20)
    point = place.found()
    assert (point.step, point.folder.parent, point.run_folder) == (20, beside.store.folder, place.run_folder(5))
    assert place.warnings == []

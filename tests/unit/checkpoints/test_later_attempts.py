# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A later attempt of a run looks at its own checkpoints, and at those that its first attempt has gone on from."""

import pytest

from nemo_rl_moe.errors import CheckpointError
from tests.support.place_of_runs import NEVER, Place, saved


@pytest.mark.parametrize("changes", [(), ("sft.seed=7",)])
def test_it_goes_on_from_where_its_first_attempt_has(place: Place, changes: tuple[str, ...]) -> None:
    saved(place.run(1), 30)
    assert place.found(run_id="b").step == 30
    # Meanwhile another run, of the same or of another experiment, is the newest.
    saved(place.run(2, *changes, run_id="other", first_run_id="other"), 90)
    assert place.found(run_id="b", attempt=2).step == 30
    assert place.warnings == []
    # The other one is locked while it runs, and nobody minds.
    with place.run(2, first_run_id="other").store.locked():
        assert place.found(run_id="b", attempt=3).step == 30


def test_one_that_has_begun_anew_begins_anew(place: Place) -> None:
    place.run(1, first_run_id="b")  # of its first attempt, which has saved nothing
    with saved(place.run(2, run_id="other", first_run_id="other"), 90).store.locked():
        assert place.find(run_id="b", attempt=2) is None
        assert place.find(NEVER, run_id="b", attempt=2) is None
    assert place.warnings == []


def test_a_named_folder_that_another_run_has_used_in_between(place: Place) -> None:
    place.run(1, shared=True, first_run_id="b")
    assert place.find(shared=True, run_id="b") is None
    assert place.find(shared=True, run_id="b", attempt=2) is None
    saved(place.run(2, shared=True, run_id="other", first_run_id="other"), 90)
    with pytest.raises(CheckpointError, match="step_90: another run has saved it since this run has begun; set "):
        place.find(shared=True, run_id="b", attempt=2)
    assert place.find(NEVER, shared=True, run_id="b", attempt=2) is None


def test_its_own_checkpoint_comes_first(place: Place) -> None:
    saved(place.run(1, shared=True), 30)
    assert place.found(shared=True, run_id="b").step == 30
    saved(place.run(1, shared=True, run_id="b"), 40)
    saved(place.run(1, shared=True, run_id="c"), 50)
    assert place.found(shared=True, run_id="b", attempt=2).step == 40


def test_a_note_that_cannot_be_read_is_none(place: Place) -> None:
    saved(place.run(1), 30)
    place.found(run_id="b")
    note = place.run_folder(1) / "checkpoints" / ".going_on.json"
    for content in ("", "[]", '{"run_id": "b"}', '{"run_id": "b", "first_run_id": 7}'):
        note.write_text(content)
        assert place.found(run_id="b", attempt=2).step == 30, "as a first attempt"

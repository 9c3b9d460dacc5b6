# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Restarts of a run resume from its own checkpoints, whatever other runs have saved meanwhile."""

import pytest

from tests.support.saving_runs import NEVER, Place, saved


@pytest.mark.parametrize("overrides", [(), (NEVER,)])
def test_a_run_that_has_begun_anew_begins_anew(place: Place, overrides: tuple[str, ...]) -> None:
    place.run(1, first_run_id="b")  # of its first launch, which has saved nothing
    with saved(place.run(2, run_id="other", first_run_id="other"), 90).store.locked():
        assert place.find(*overrides, run_id="b", restart=1) is None
    assert place.warnings == []


def test_its_own_checkpoint_comes_first(place: Place) -> None:
    saved(place.run(1, shared=True), 30)
    assert place.found(shared=True, run_id="b").step == 30
    saved(place.run(1, shared=True, run_id="b"), 40)
    saved(place.run(1, shared=True, run_id="c"), 50)
    assert place.found(shared=True, run_id="b", restart=1).step == 40


def test_its_own_checkpoint_is_found_among_other_runs_folders(place: Place) -> None:
    saved(place.run(1, run_id="b", first_run_id="b"), 40)
    with saved(place.run(2, run_id="other", first_run_id="other"), 90).store.locked():
        assert place.found(run_id="b", restart=1).step == 40

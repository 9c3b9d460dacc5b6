# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run does not save to where it would remove the model that it starts from."""

from pathlib import Path

import pytest

from nemo_rl_moe.errors import ConfigurationError
from tests.support.saving_runs import NEVER, Place, saved

FOLDERS = ("step_10", "step_10/policy", "final")


@pytest.fixture
def shared(place: Place) -> Path:
    """Holds a checkpoint, final weights, and a model that somebody has put there."""
    saved(place.run(3, shared=True), 10)
    folder = place.folder / "shared"
    for name in ("final", "my_model", "step_10x"):
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize("resume", [NEVER, "checkpointing.resume=auto", "checkpointing.keep_top_k=null"])
@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_run_may_remove_is_no_model_for_it(name: str, resume: str, place: Place, shared: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        place.find(f"policy.model_name={shared / name}", resume, shared=True)
    assert caught.value.problems == [
        f"policy.model_name: {shared / name} is in checkpointing.checkpoint_dir ({shared}), where this run removes or"
        f" replaces {name.split('/')[0]} as it saves; set another checkpointing.checkpoint_dir, or copy the model to"
        " another place"
    ]


def test_links_are_seen_through(place: Place, shared: Path) -> None:
    (place.folder / "link").symlink_to(shared / "step_10")
    with pytest.raises(ConfigurationError, match=r"link is in checkpointing\.checkpoint_dir"):
        place.find(f"policy.model_name={place.folder / 'link'}", NEVER, shared=True)
    # And one among the checkpoints, whose own name would go.
    (place.folder / "model").mkdir()
    (shared / "step_20").symlink_to(place.folder / "model")
    with pytest.raises(ConfigurationError, match="replaces step_20"):
        place.find(f"policy.model_name={shared / 'step_20'}", NEVER, shared=True)


@pytest.mark.parametrize("name", ["my_model", "step_10x", "nothing", "."])
def test_what_is_never_touched_may_be_the_model(name: str, place: Place, shared: Path) -> None:
    assert place.find(f"policy.model_name={shared / name}", NEVER, shared=True) is None


def test_another_folder_for_the_checkpoints_is_the_way_out(place: Place, shared: Path) -> None:
    model = f"policy.model_name={shared / 'step_10'}"
    assert place.find(model, NEVER) is None
    assert place.find(model, "checkpointing.enabled=false", shared=True) is None


def test_the_folder_of_an_earlier_run_that_goes_on(place: Place) -> None:
    """No folder is configured: it is the one in which the run goes on."""
    model = place.run_folder(1) / "checkpoints" / "step_5"
    saved(place.run(1, f"policy.model_name={model}"), 5, 10)
    with pytest.raises(ConfigurationError, match="replaces step_5"):
        place.find(f"policy.model_name={model}")

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a run begins: complete or not, in which folder, and never beside another one on the same checkpoints."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.algorithms.step_recorder import RunSummary
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.errors import CheckpointError, ConfigurationError
from nemo_rl_moe.launch.saved_training import FINAL_RUN_FILE
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.launch.training_run import TrainingRun
from tests.support.saving_runs import Run as SavedRun

NUM_STEPS = 12


@contextmanager
def prepared(
    config: SFTMasterConfig, run_id: str = "second", restart_number: int = 0, num_steps: int = NUM_STEPS
) -> Iterator[TrainingRun]:
    with TrainingRun(config, RunLaunch(run_id, restart_number), StopSignals()) as run:
        run.begin(num_steps, {"model": "a"})
        yield run


@pytest.fixture
def saved(tmp_path: Path) -> SavedRun:
    """A run that has saved step 10."""
    folders = (f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}", f"logger.log_dir={tmp_path / 'logs'}")
    run = SavedRun(tmp_path, *folders)
    run.save(10)
    return run


def write_final(saved: SavedRun, origin: dict[str, Any]) -> None:
    folder = saved.store.folder / "final"
    folder.mkdir()
    (folder / FINAL_RUN_FILE).write_text(json.dumps(origin))


def test_goes_on_and_is_not_complete(saved: SavedRun) -> None:
    with prepared(saved.config) as run:
        assert run.saved.resume is not None
        assert run.saved.resume.step == 10
        assert not run.is_complete


def test_complete_is_what_has_written_its_own_final_weights(saved: SavedRun) -> None:
    with prepared(saved.config, num_steps=10) as run:
        assert not run.is_complete, "the final weights are missing"
        origin = run.saved.origin_of_weights(10)
    write_final(saved, origin | {"first_run_id": "another"})
    with prepared(saved.config, num_steps=10) as run:
        assert not run.is_complete, "those are another training's"
    (saved.store.folder / "final" / FINAL_RUN_FILE).write_text(json.dumps(origin))
    with prepared(saved.config, num_steps=10) as run:
        assert run.is_complete
    with prepared(saved.config, num_steps=20) as run:
        assert not run.is_complete, "there is more to do"
    with prepared(saved.config, num_steps=8) as run:
        assert run.is_complete, "fewer steps than were done ask for nothing more"


def test_prompts_that_are_used_up_are_the_end_too(saved: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:
    with prepared(saved.config) as run:
        origin = run.saved.origin_of_weights(10)
    write_final(saved, origin)
    capsys.readouterr()
    with prepared(saved.config) as run:
        assert run.is_complete
    assert "is the end of this run: its prompts are used up after 10 steps" in capsys.readouterr().out


def test_no_second_run_on_the_same_checkpoints(saved: SavedRun) -> None:
    with (
        prepared(saved.config),
        pytest.raises(CheckpointError, match="another run is writing to"),
        prepared(saved.config, run_id="third"),
    ):
        pass
    with prepared(saved.config, run_id="third") as run:
        assert run.saved.resume is not None


def test_a_second_run_is_refused_when_it_is_entered(saved: SavedRun) -> None:
    """Before a model or data are read, also where nothing has been saved yet; one that saves nothing leaves nothing."""
    folder = saved.store.folder.with_name("of_nobody")
    checkpointing = saved.config.checkpointing.model_copy(update={"checkpoint_dir": str(folder)})
    config = saved.config.model_copy(update={"checkpointing": checkpointing})
    first, second = (TrainingRun(config, RunLaunch(name), StopSignals()) for name in ("first", "second"))
    with first, pytest.raises(CheckpointError, match="another run is writing to"), second:
        pass
    assert not folder.exists()
    with second:
        assert second.saved.resume is None


def test_a_damaged_checkpoint_is_reported_when_the_run_is_entered(saved: SavedRun) -> None:
    (saved.store.path_of(10) / "state.json").write_text("{}")
    run = TrainingRun(saved.config, RunLaunch("second"), StopSignals())
    with pytest.raises(CheckpointError, match="none of the checkpoints there can be used"), run:
        pass
    with saved.store.locked():  # nothing of the refused run holds it
        pass


def test_the_end_of_a_run_warns_of_weights_that_are_left_out(
    saved: SavedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Policy:
        def save_weights(self, directory: Path) -> list[str]:
            directory.mkdir()
            write_inventory(directory)
            return ["decoder.layers.0.mlp.router.bias"]

    policy: Any = Policy()
    with prepared(saved.config, num_steps=10) as run:
        run.saved.models, run._folder = {"policy": policy}, tmp_path
        run.end(RunSummary.of(LoopState(step=10), None))
        assert run.is_complete
    printed = "".join(capsys.readouterr().out.split("\n"))
    assert "/final: decoder.layers.0.mlp.router.bias is left out of the exported weights: the family has no" in printed


@pytest.mark.parametrize("lost", ["the folder", "its inventory"])
def test_final_weights_that_vanish_before_they_are_signed_are_reported_in_one_line(
    saved: SavedRun, tmp_path: Path, lost: str
) -> None:
    class Policy:
        def save_weights(self, directory: Path) -> list[str]:
            if lost == "its inventory":
                directory.mkdir()
            return []

    policy: Any = Policy()
    with prepared(saved.config, num_steps=10) as run:
        run.saved.models, run._folder = {"policy": policy}, tmp_path
        with pytest.raises(CheckpointError, match=r"final: cannot be written: .*No such file or directory"):
            run.end(RunSummary.of(LoopState(step=10), None))


def test_a_run_that_would_remove_its_own_model_is_refused(saved: SavedRun) -> None:
    model = saved.store.folder / "step_10"
    config = saved.config.model_copy(
        update={"policy": saved.config.policy.model_copy(update={"model_name": str(model)})}
    )
    with pytest.raises(ConfigurationError, match="copy the model to another place"), prepared(config):
        pass

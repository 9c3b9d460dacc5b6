# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Decides where a run starts: at the beginning, or at which checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_moe.checkpoints.changes import changed_keys, changes_line, layout_line, wrong_changes
from nemo_rl_moe.checkpoints.state import CheckpointState, layout_of
from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME, Checkpoint, CheckpointStore
from nemo_rl_moe.config.resolved import dump_resolved
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.loggers.run_folder import newest_run_folders

CHECKPOINTS_FOLDER_NAME = "checkpoints"
"""Inside the run's folder, where no other folder is configured."""

WAY_OUT = "set checkpointing.resume=never to start anew, or another checkpointing.checkpoint_dir"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from.

    Attributes:
        folder: The checkpoint's folder.
        state: What it says of itself.
        run_folder: The folder of the run that wrote it, in which the run goes on; None where that is gone.
    """

    folder: Path
    state: CheckpointState
    run_folder: Path | None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.loop.step

    @property
    def policy_folder(self) -> Path:
        """What `PolicyInterface.load_checkpoint` takes."""
        return self.folder / POLICY_FOLDER_NAME

    def summary(self, num_steps: int) -> str:
        """One line: where the run goes on; or, where nothing is left to do, how to do something.

        Args:
            num_steps: Steps of the whole run.
        """
        if self.step >= num_steps:
            return (
                f"{self.folder} is the end of this run: {self.step} of {num_steps} steps are done. For more of them set"
                f" a higher {self.state.algorithm}.max_num_steps or max_num_epochs; or {WAY_OUT}"
            )
        return f"going on from {self.folder}: {self.step} of {num_steps} steps are done"


def checkpoint_dir_of(config: MasterConfig, run_folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return Path(config.checkpointing.checkpoint_dir or run_folder / CHECKPOINTS_FOLDER_NAME)


def find_resume_point(
    config: MasterConfig, run_id: str, attempt_number: int, warn: Callable[[str], None]
) -> ResumePoint | None:
    """The checkpoint to go on from, or None to start at the beginning.

    A run's later attempts go on from its own newest checkpoint. A first attempt, or one whose run has saved nothing
    yet, goes by `checkpointing.resume`. Leftovers of a run that was stopped while it saved are cleared away.

    Args:
        config: A checked configuration.
        run_id: The run's.
        attempt_number: Counts from 1.
        warn: Gets what the user should know, a line each.

    Raises:
        CheckpointError: Another run is writing there, or the run cannot go on from what is there.
    """
    settings, is_first = config.checkpointing, attempt_number == 1
    if not settings.enabled or (is_first and settings.resume == "never" and settings.checkpoint_dir is None):
        return None
    store = _store_with_checkpoints(config, None if is_first else run_id, warn)
    if store is None:
        return None
    with store.locked():
        store.sweep()
        checkpoints = store.checkpoints()
    own = [checkpoint for checkpoint in checkpoints if checkpoint.state.run_id == run_id]
    if own and not is_first:
        return _resume_from(own[-1], config, warn)
    if settings.resume == "never":
        if checkpoints and settings.checkpoint_dir is not None:
            steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
            warn(
                f"checkpointing.resume is never: {settings.checkpoint_dir} holds checkpoints of an earlier run (steps"
                f" {steps}), which will be removed as soon as this run has saved its first one"
            )
        return None
    history = newest_history(checkpoints)
    return _resume_from(history[-1], config, warn) if history else None


def newest_history(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Of checkpoints in one folder, those of the history of training that was written to last, ascending by step.

    There are others only where a run that started anew was stopped before it had removed the older ones.
    """
    if not checkpoints:
        return []
    last = max(checkpoints, key=lambda checkpoint: (checkpoint.state.time, checkpoint.step)).state.first_run_id
    return [checkpoint for checkpoint in checkpoints if checkpoint.state.first_run_id == last]


def _store_with_checkpoints(
    config: MasterConfig, run_id: str | None, warn: Callable[[str], None]
) -> CheckpointStore | None:
    """The configured folder; or else that of the newest run that has checkpoints, where a certain run comes first."""
    if config.checkpointing.checkpoint_dir is not None:
        store = CheckpointStore(Path(config.checkpointing.checkpoint_dir), warn)
        return store if store.is_used() else None
    newest: CheckpointStore | None = None
    for run_folder in newest_run_folders(config.logger.log_dir):
        store = CheckpointStore(run_folder / CHECKPOINTS_FOLDER_NAME, warn)
        found = store.checkpoints()
        if any(run_id in (None, checkpoint.state.run_id) for checkpoint in found):
            return store
        newest = newest or (store if found else None)
    return newest


def _resume_from(checkpoint: Checkpoint, config: MasterConfig, warn: Callable[[str], None]) -> ResumePoint:
    state, resolved = checkpoint.state, dump_resolved(config)
    algorithm = next(iter(resolved))
    if state.algorithm != algorithm:
        raise CheckpointError(
            f"{checkpoint.folder}: a checkpoint of {state.algorithm}, and this run is {algorithm}; {WAY_OUT}"
        )
    changes = changed_keys(state.config, resolved)
    wrong = wrong_changes(algorithm, changes, with_optimizer=state.with_optimizer)
    if wrong:
        raise CheckpointError(
            [
                f"{key}: got {now}, but {checkpoint.folder} was saved with {before}: {reason}; set {before},"
                f" or {WAY_OUT}"
                for key, (before, now, reason) in wrong.items()
            ]
        )
    for line in (changes_line(changes), layout_line(state.layout, layout_of(config))):
        if line is not None:
            warn(line)
    if not state.with_optimizer:
        warn(
            f"{checkpoint.folder} was saved without the optimizer (checkpointing.save_optimizer: false): the optimizer"
            " starts anew, and the run will differ from one that never stopped"
        )
    return ResumePoint(checkpoint.folder, state, _run_folder_of(checkpoint, config, warn))


def _run_folder_of(checkpoint: Checkpoint, config: MasterConfig, warn: Callable[[str], None]) -> Path | None:
    if config.checkpointing.checkpoint_dir is None:
        return checkpoint.folder.parent.parent
    # A run's folder is written to and cut back: what a checkpoint names must look like one.
    folder = Path(checkpoint.state.run_folder)
    if folder in newest_run_folders(folder.parent) and (folder / "config.yaml").is_file():
        return folder
    warn(f"{folder}, which {checkpoint.folder} belongs to, is not there: metrics go on in a new folder")
    return None

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Notes, beside checkpoints, which run has gone on from them: its later attempts look nowhere else."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_moe.checkpoints.changes import (
    changed_keys,
    changes_line,
    layout_line,
    other_experiment,
    refuse_model_among_checkpoints,
    wrong_changes,
)
from nemo_rl_moe.checkpoints.state import CheckpointState, layout_of, read_json
from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME, Checkpoint, CheckpointStore, of_history
from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.run_folder.folder import find_run_folder, newest_run_folders, read_run_id

NOTE_FILE_NAME = ".going_on.json"


def note_history(checkpoint_dir: Path, run_id: str, first_run_id: str) -> None:
    """Notes that a run goes on from a history of training; of several runs, the last one is noted.

    A disk that does not take it is passed over: a later attempt then looks for checkpoints as a first one does.

    Args:
        checkpoint_dir: Where the checkpoint lies.
        run_id: The run's.
        first_run_id: The history's.
    """
    staging = checkpoint_dir / f"{NOTE_FILE_NAME}.incomplete"
    try:
        staging.write_text(json.dumps({"run_id": run_id, "first_run_id": first_run_id}) + "\n", encoding="utf-8")
        staging.replace(checkpoint_dir / NOTE_FILE_NAME)
    except OSError:
        pass


def noted_history(checkpoint_dir: Path, run_id: str) -> str | None:
    """The `first_run_id` of the history that a run has gone on from in this folder; None where none is noted."""
    try:
        note = read_json(checkpoint_dir / NOTE_FILE_NAME)
    except CheckpointError:
        return None
    if not isinstance(note, dict) or note.get("run_id") != run_id:
        return None
    history = note.get("first_run_id")
    return history if isinstance(history, str) else None


def run_folder_of(checkpoint: Checkpoint, config: MasterConfig, warn: Callable[[str], None]) -> Path | None:
    """The folder of the checkpoint's run, which is written to and cut back: only where it surely belongs to it.

    Args:
        checkpoint: Where the run goes on.
        config: The run's.
        warn: Gets a line where there is none.

    Returns:
        None where the checkpoint is a copy, or the folder is gone or another run's.
    """
    state, recorded = checkpoint.state, Path(checkpoint.state.run_folder)
    around = checkpoint.folder.parent.parent
    if checkpoint.folder.parent.resolve() == Path(state.checkpoint_dir):
        # The same folder under the shorter name that the user knows, where it is the same.
        folder = around if around.resolve() == recorded.resolve() else recorded
    elif config.checkpointing.checkpoint_dir is None and not _belongs_to(recorded, state):
        folder = around  # all of it was moved
    else:
        warn(f"{checkpoint.folder} is a copy: {recorded} is left as it is, and metrics go on in a new folder")
        return None
    if _belongs_to(folder, state):
        return folder
    warn(f"{folder}, which {checkpoint.folder} belongs to, is not there: metrics go on in a new folder")
    return None


def _belongs_to(run_folder: Path, state: CheckpointState) -> bool:
    return (
        run_folder in newest_run_folders(run_folder.parent)
        and (run_folder / "config.yaml").is_file()
        and state.run_folder_id is not None
        and read_run_id(run_folder) == state.run_folder_id
    )


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

    A run's later attempts go on from its own newest checkpoint, or else from the history that its first attempt has
    gone on from; one whose run has begun anew and has saved nothing starts anew. Everything else goes by
    `checkpointing.resume`. Where no folder is configured, the newest run that has checkpoints is continued only if it
    is the same experiment. Leftovers of a run that was stopped while it saved are cleared away.

    Args:
        config: A checked configuration.
        run_id: The run's.
        attempt_number: Counts from 1.
        warn: Gets what the user should know, a line each.

    Raises:
        CheckpointError: Another run is writing there, or the run cannot go on from what is there.
        ConfigurationError: The run would remove the model that it starts from.
    """
    if not config.checkpointing.enabled:
        return None
    if config.checkpointing.checkpoint_dir is not None:
        refuse_model_among_checkpoints(config, Path(config.checkpointing.checkpoint_dir))
    point = _resume_point(config, run_id, attempt_number, _told_once(warn))
    if point is not None:
        refuse_model_among_checkpoints(config, point.folder.parent)
    return point


def _resume_point(
    config: MasterConfig, run_id: str, attempt_number: int, warn: Callable[[str], None]
) -> ResumePoint | None:
    if attempt_number > 1:
        own = _of_earlier_attempt(config, run_id, warn)
        if own is not None:
            return _resume_from(own, config, warn)
        if find_run_folder(config.logger.log_dir, run_id) is not None:
            _refuse_what_came_between(config, warn)
            return None
    newest = _newest(config, warn)
    if newest is None:
        return None
    point = _resume_from(newest, config, warn)
    note_history(newest.folder.parent, run_id, newest.state.first_run_id)
    return point


def newest_history(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Of checkpoints in one folder, those of the history of training that was written to last, ascending by step.

    There are others only where a run that started anew was stopped before it had removed the older ones.
    """
    if not checkpoints:
        return []
    last = max(checkpoints, key=lambda checkpoint: (checkpoint.state.time, checkpoint.step)).state.first_run_id
    return of_history(checkpoints, last)


def _stores(config: MasterConfig, warn: Callable[[str], None]) -> Iterator[CheckpointStore]:
    """Where checkpoints may be: the configured folder, or else those of the run folders, newest first."""
    if config.checkpointing.checkpoint_dir is not None:
        yield CheckpointStore(Path(config.checkpointing.checkpoint_dir), warn)
    else:
        for run_folder in newest_run_folders(config.logger.log_dir):
            yield CheckpointStore(run_folder / CHECKPOINTS_FOLDER_NAME, warn)


def _tidied(store: CheckpointStore) -> list[Checkpoint]:
    with store.locked():
        store.sweep()
        return store.checkpoints()


def _of_earlier_attempt(config: MasterConfig, run_id: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of the run itself, or of the history that it has gone on from."""

    def newest(checkpoints: Sequence[Checkpoint], history: str | None) -> Checkpoint | None:
        own = [checkpoint for checkpoint in checkpoints if checkpoint.state.run_id == run_id]
        return next(reversed(own or of_history(checkpoints, history)), None)

    for store in _stores(config, warn):
        history = noted_history(store.folder, run_id)
        if newest(store.checkpoints(), history) is not None:  # other runs' folders are not locked
            return newest(_tidied(store), history)
    return None


def _refuse_what_came_between(config: MasterConfig, warn: Callable[[str], None]) -> None:
    """Raises where another run has saved to the configured folder since this run has found none to go on from."""
    settings = config.checkpointing
    if settings.checkpoint_dir is None or settings.resume == "never":
        return
    store = CheckpointStore(Path(settings.checkpoint_dir), warn)
    if store.is_used() and (others := _tidied(store)):
        raise CheckpointError(f"{others[-1].folder}: another run has saved it since this run has begun; {WAY_OUT}")


def _newest(config: MasterConfig, warn: Callable[[str], None]) -> Checkpoint | None:
    """Where a first attempt goes on."""
    settings = config.checkpointing
    if settings.checkpoint_dir is None:
        return _newest_of_same_experiment(config, warn) if settings.resume == "auto" else None
    store = CheckpointStore(Path(settings.checkpoint_dir), warn)
    checkpoints = _tidied(store) if store.is_used() else []
    if settings.resume == "auto":
        _refuse_damage_alone(store, checkpoints)
        return next(reversed(newest_history(checkpoints)), None)
    if checkpoints:
        steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
        warn(
            f"checkpointing.resume is never: {settings.checkpoint_dir} holds checkpoints of an earlier run (steps"
            f" {steps}), which will be removed as soon as this run has saved its first one"
        )
    return None


def _refuse_damage_alone(store: CheckpointStore, usable: Sequence[Checkpoint]) -> None:
    """Raises where all that a run has saved is damaged: to start anew is not for this program to decide."""
    if not usable and store.has_any():
        raise CheckpointError(f"{store.folder}: none of the checkpoints there can be used; {WAY_OUT}")


def _newest_of_same_experiment(config: MasterConfig, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of the newest run that has any; None, and a line, where that is another experiment."""
    resolved = dump_resolved(config)
    algorithm = algorithm_of(config)
    for store in _stores(config, warn):
        history = newest_history(store.checkpoints())
        _refuse_damage_alone(store, history)
        if not history:
            continue
        before = history[-1].state
        other = ("algorithm", before.algorithm, algorithm.name)
        if before.algorithm == algorithm.name:
            different = other_experiment(algorithm, changed_keys(before.config, resolved))
            if different is None:
                return next(reversed(newest_history(_tidied(store))), None)
            other = different
        key, old, new = other
        warn(
            f"{store.folder.parent} is passed over, and this run starts anew: {key} was {old} there and is {new} here;"
            f" to go on from it nonetheless, set checkpointing.checkpoint_dir={store.folder}"
        )
        return None
    return None


def _resume_from(checkpoint: Checkpoint, config: MasterConfig, warn: Callable[[str], None]) -> ResumePoint:
    state, resolved = checkpoint.state, dump_resolved(config)
    algorithm = algorithm_of(config)
    if state.algorithm != algorithm.name:
        raise CheckpointError(
            f"{checkpoint.folder}: a checkpoint of {state.algorithm}, and this run is {algorithm.name}; {WAY_OUT}"
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
    return ResumePoint(checkpoint.folder, state, run_folder_of(checkpoint, config, warn))


def _told_once(warn: Callable[[str], None]) -> Callable[[str], None]:
    """Leaves out a line that was told before: several readers of one folder meet the same damage."""
    told: set[str] = set()

    def warn_once(line: str) -> None:
        if line not in told:
            told.add(line)
            warn(line)

    return warn_once

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a run resumes from: its own after a restart, or else the newest one of the same experiment."""

import functools
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
from nemo_rl_moe.checkpoints.fingerprints import MODEL
from nemo_rl_moe.checkpoints.state import CheckpointState, layout_of
from nemo_rl_moe.checkpoints.store import Checkpoint, CheckpointStore, of_history, state_folder
from nemo_rl_moe.config.algorithm import ALGORITHMS, algorithm_of
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.runs.folder.folder import find_run_folder, newest_run_folders, read_run_id

CHECKPOINTS_FOLDER_NAME = "checkpoints"
"""Default folder of checkpoints, in the run's folder."""

WAY_OUT = "set checkpointing.resume=never to start anew, or another checkpointing.checkpoint_dir"


@dataclass(frozen=True)
class ResumePoint(Checkpoint):
    """Checkpoint that a run resumes from.

    Attributes:
        run_folder: Folder of the run that wrote the checkpoint. The resumed run continues this folder. None if the
            resumed run gets a new folder.
    """

    run_folder: Path | None

    def state_folder(self, role: str) -> Path:
        """Return the folder of a role's training state. The folder must exist."""
        folder = state_folder(self.folder, role)
        if not folder.is_dir():
            raise CheckpointError(f"{self.folder}: holds no state of the role {role}, which this run trains; {WAY_OUT}")
        return folder

    def summary(self, num_steps: int) -> str:
        """Return a line for the user with the step to resume at, or how to get more steps if all are done."""
        if self.step >= num_steps:
            return (
                f"{self.folder} is the end of this run: {self.step} of {num_steps} steps are done. For more steps set"
                f" a higher {ALGORITHMS[self.state.algorithm].loop_name}.max_num_steps or max_num_epochs; or {WAY_OUT}"
            )
        return f"going on from {self.folder}: {self.step} of {num_steps} steps are done"


def checkpoint_dir_of(config: MasterConfig, run_folder: Path) -> Path:
    return Path(config.checkpointing.checkpoint_dir or run_folder / CHECKPOINTS_FOLDER_NAME)


def find_resume_point(
    config: MasterConfig, run_id: str, restart_number: int, warn: Callable[[str], None]
) -> ResumePoint | None:
    """Return the checkpoint to resume from. None to start at the beginning.

    A restart resumes from the newest checkpoint of its run. Without one, and on a first launch, `checkpointing.resume`
    decides. If no folder is configured, the newest run with checkpoints is continued only if it is the same experiment.
    Leftovers of a save that was killed are deleted.

    Args:
        restart_number: Number of restarts so far, 0 for the first launch.

    Raises:
        CheckpointError: Another run is writing to the folder, or the run cannot resume from its checkpoints.
    """
    if not config.checkpointing.enabled:
        return None
    if config.checkpointing.checkpoint_dir is not None:
        refuse_model_among_checkpoints(config, Path(config.checkpointing.checkpoint_dir))
    warn = functools.cache(warn)  # a folder is read several times, but warns once
    checkpoint = _own_checkpoint(config, run_id, warn) if restart_number > 0 else None
    if checkpoint is None and not (restart_number > 0 and _has_begun_anew(config, run_id)):
        checkpoint = _checkpoint_of_earlier_run(config, warn)
    if checkpoint is None:
        return None
    refuse_model_among_checkpoints(config, checkpoint.folder.parent)
    return _checked_resume_point(checkpoint, config, warn)


def older_resume_point(
    config: MasterConfig, damaged: Sequence[Path], warn: Callable[[str], None]
) -> ResumePoint | None:
    """Return the newest checkpoint without damage, if there is one.

    Args:
        damaged: Checkpoints of one training history, in one folder, that were found damaged on loading.
    """
    checkpoints = CheckpointStore(damaged[0].parent, warn).checkpoints()
    history = next(found.state.first_run_id for found in checkpoints if found.folder == damaged[0])
    usable = [found for found in of_history(checkpoints, history) if found.folder not in damaged]
    return _checked_resume_point(usable[-1], config, warn) if usable else None


def newest_history(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints, ascending by step, of the training history that was written last.

    A folder has several histories if a run that started anew was killed before it removed the older ones.
    """
    if not checkpoints:
        return []
    last = max(checkpoints, key=lambda checkpoint: (checkpoint.state.time, checkpoint.step)).state.first_run_id
    return of_history(checkpoints, last)


def _has_begun_anew(config: MasterConfig, run_id: str) -> bool:
    """Return whether a run has started from step 0 in a new folder, so that other runs' checkpoints are ignored."""
    return config.checkpointing.checkpoint_dir is None and find_run_folder(config.logger.log_dir, run_id) is not None


def _stores(config: MasterConfig, warn: Callable[[str], None]) -> Iterator[CheckpointStore]:
    """Yield the configured folder of checkpoints, or else the folder of each run, newest first."""
    if config.checkpointing.checkpoint_dir is not None:
        yield CheckpointStore(Path(config.checkpointing.checkpoint_dir), warn)
    else:
        for run_folder in newest_run_folders(config.logger.log_dir):
            yield CheckpointStore(run_folder / CHECKPOINTS_FOLDER_NAME, warn)


def _swept_checkpoints(store: CheckpointStore) -> list[Checkpoint]:
    with store.locked():
        store.sweep()
        return store.checkpoints()


def _own_checkpoint(config: MasterConfig, run_id: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the run's newest checkpoint, if any, without locking folders of other runs, which may be active."""
    for store in _stores(config, warn):
        if any(checkpoint.state.run_id == run_id for checkpoint in store.checkpoints()):
            own = [checkpoint for checkpoint in _swept_checkpoints(store) if checkpoint.state.run_id == run_id]
            return next(reversed(own), None)
    return None


def _checkpoint_of_earlier_run(config: MasterConfig, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint that `checkpointing.resume` selects, if any."""
    settings = config.checkpointing
    if settings.checkpoint_dir is None:
        return _newest_of_same_experiment(config, warn) if settings.resume == "auto" else None
    store = CheckpointStore(Path(settings.checkpoint_dir), warn)
    checkpoints = _swept_checkpoints(store) if store.folder.is_dir() else []
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
    """Raise if every checkpoint of a run is damaged, as only the user may decide to start anew."""
    if not usable and store.has_any():
        raise CheckpointError(f"{store.folder}: none of the checkpoints there can be used; {WAY_OUT}")


def _newest_of_same_experiment(config: MasterConfig, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint of the newest run that has one. Warn and return None if the experiment differs."""
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
                return next(reversed(newest_history(_swept_checkpoints(store))), None)
            other = different
        key, old, new = other
        warn(
            f"{store.folder.parent} is not resumed, and this run starts anew: {key} was {old} there and is {new} here;"
            f" to resume that run nonetheless, set checkpointing.checkpoint_dir={store.folder}"
        )
        return None
    return None


def _checked_resume_point(checkpoint: Checkpoint, config: MasterConfig, warn: Callable[[str], None]) -> ResumePoint:
    """Check that the configuration can continue a checkpoint, and return its resume point."""
    state, resolved = checkpoint.state, dump_resolved(config)
    algorithm = algorithm_of(config)
    if state.algorithm != algorithm.name:
        raise CheckpointError(
            f"{checkpoint.folder}: a checkpoint of {state.algorithm}, and this run is {algorithm.name}; {WAY_OUT}"
        )
    changes = changed_keys(state.config, resolved)
    wrong = wrong_changes(
        algorithm,
        changes,
        with_optimizer=state.with_optimizer,
        with_adapters=config.policy.lora is not None,
        base_is_known=MODEL in state.fingerprints,
    )
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
    """Return the folder of the checkpoint's run, whose metrics the resumed run truncates and continues."""
    # None, with a warning, if the checkpoint is a copy, as two runs must not share a folder, or the folder is missing.
    state, recorded = checkpoint.state, Path(checkpoint.state.run_folder)
    around = checkpoint.folder.parent.parent
    is_copy = checkpoint.folder.parent.resolve() != Path(state.checkpoint_dir)
    if is_copy and (config.checkpointing.checkpoint_dir is not None or _belongs_to(recorded, state)):
        warn(
            f"{checkpoint.folder} is a copy: the folder of its run, {recorded}, stays unchanged, and this run writes"
            " its metrics to a new folder"
        )
        return None
    # A moved run folder, or the same one under the path that the user gave. Otherwise the recorded one.
    folder = around if is_copy or around.resolve() == recorded.resolve() else recorded
    if _belongs_to(folder, state):
        return folder
    warn(
        f"{folder}, the folder of the run that wrote {checkpoint.folder}, is missing: this run writes its metrics to a"
        " new folder"
    )
    return None


def _belongs_to(run_folder: Path, state: CheckpointState) -> bool:
    return state.run_folder_id is not None and read_run_id(run_folder) == state.run_folder_id

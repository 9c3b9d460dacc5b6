# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Saved state of a training run: the checkpoint from which it resumes, its own checkpoints, and its final weights."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.checkpoints.best_metric import choice_in_force
from nemo_rl_moe.checkpoints.changes import OTHER_BASE
from nemo_rl_moe.checkpoints.checkpointer import Checkpointer
from nemo_rl_moe.checkpoints.fingerprints import changed_inputs, model_fingerprints, other_base
from nemo_rl_moe.checkpoints.resume import (
    WAY_OUT,
    ResumePoint,
    checkpoint_dir_of,
    find_resume_point,
    older_resume_point,
)
from nemo_rl_moe.checkpoints.state import RunDescription, layout_of
from nemo_rl_moe.checkpoints.store import FINAL_WEIGHTS_FOLDER, CheckpointStore, final_weights_folder, model_folder
from nemo_rl_moe.checksums import InventoryError, add_to_inventory
from nemo_rl_moe.config.algorithm import algorithm_of, metric_in_force
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_run import POLICY_ROLE
from nemo_rl_moe.errors import CheckpointError, DamagedCheckpointError
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.models.model_files import left_out_line
from nemo_rl_moe.models.safetensors_folder import one_line
from nemo_rl_moe.runs.folder.folder import collect_versions
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import TrainableModel

FINAL_RUN_FILE = "training_run.json"
"""File next to the final weights that identifies the run that trained them."""


class SavedTraining:
    """Saved state of one run: the checkpoint from which it resumes, and its own checkpoints.

    Args:
        launch: Identity of the run, and the number of the restart.
        opened: Stack that closes everything that this object opens, when the run ends.

    Attributes:
        resume: The checkpoint from which the run resumes. None: the run starts from the beginning.
        models: Role -> trained model.
        num_steps: Number of steps of the complete run, known after `begin`.
    """

    def __init__(self, config: MasterConfig, launch: RunLaunch, console: ConsoleLogger, opened: ExitStack):
        self.resume: ResumePoint | None = None
        self.models: dict[str, TrainableModel] = {}
        self.num_steps = 0
        self._config, self._launch, self._console, self._opened = config, launch, console, opened
        self._fingerprints: Mapping[str, str] = {}
        self._store: CheckpointStore | None = None

    def claim(self) -> None:
        """Find the checkpoint from which to resume, and lock the folder of checkpoints if it is known already."""
        run_id, restart_number = self._launch.run_id, self._launch.restart_number
        self.resume = find_resume_point(self._config, run_id, restart_number, self._console.warn)
        self._store = _known_store(self._config, self.resume, self._console)
        if self._store is not None:
            self._opened.enter_context(self._store.locked())
            self._store.sweep()

    def begin(self, num_steps: int, fingerprints: Mapping[str, str]) -> None:
        """Report the step from which a resumed run continues, and the inputs that have changed since it was saved.

        Args:
            num_steps: Number of steps of the complete run.
            fingerprints: Name of an input -> a text that changes with the input, for inputs on which a resumed run
                relies. Fingerprints of models are added.

        Raises:
            CheckpointError: The checkpoint's adapters belong to another base model.
        """
        fingerprints = {**fingerprints, **model_fingerprints(self._config)}
        self.num_steps, self._fingerprints = num_steps, fingerprints
        resume = self.resume
        if resume is None:
            return
        if (base := other_base(self._config, resume.state.fingerprints, fingerprints)) is not None:
            key, before, now = base
            raise CheckpointError(
                f"{key}: got {now}, but {resume.folder} was saved with {before}: {OTHER_BASE}; put the same files"
                f" there, or {WAY_OUT}"
            )
        for line in changed_inputs(resume.state.fingerprints, fingerprints):
            self._console.warn(line)
        log_dir = self._config.logger.log_dir
        if resume.run_folder is not None and resume.run_folder.parent.resolve() != Path(log_dir).resolve():
            self._console.warn(f"logger.log_dir is {log_dir}, but the resumed run continues in {resume.run_folder}")
        self._console.message(self._beginning(resume))

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run has finished and written the final weights."""
        if self.resume is None:
            return False
        final = self.resume.folder.parent / FINAL_WEIGHTS_FOLDER / FINAL_RUN_FILE
        try:
            written: Any = json.loads(final.read_bytes())
        except (OSError, ValueError):
            return False
        expected = self.origin_of_weights(self.resume.step)
        if self.resume.step >= self.num_steps and isinstance(written, dict):
            expected["num_steps"] = written.get("num_steps")  # a lower number of steps needs no further training
        return bool(written == expected)

    def restore(self) -> None:
        """Load the checkpoint into the trained models. The reference model keeps the run's initial weights.

        If the checkpoint is damaged, load the newest checkpoint before it that is not.

        Raises:
            CheckpointError: All checkpoints are damaged, or a checkpoint belongs to another model or holds something
                other than tensors.
        """
        damaged: list[Path] = []
        while self.resume is not None:
            try:
                with self._console.phase(f"loading {self.resume.folder}"):
                    for role, model in self.models.items():
                        folder = self.resume.state_folder(role)
                        model.load_checkpoint(folder, with_optimizer=self.resume.state.with_optimizer)
                return
            except DamagedCheckpointError as error:
                damaged.append(self.resume.folder)
                self.resume = self._before_damage(damaged, error)

    def _before_damage(self, damaged: Sequence[Path], error: DamagedCheckpointError) -> ResumePoint:
        """Return the newest checkpoint of the same training that is not among the damaged ones."""
        older = older_resume_point(self._config, damaged, self._console.warn)
        if older is None:
            raise error
        for problem in error.problems:
            self._console.warn(problem)
        self._console.message(self._beginning(older))
        return older

    def open_checkpointer(self, loggers: FanOutLogger, folder: Path) -> Checkpointer:
        """Return the object that writes checkpoints during the loop. Checkpoints store the loggers' ids, so that a
        resumed run continues their records."""
        store, config = self._store, self._config
        loop_config: Any = config  # every algorithm has data
        if store is None:
            store = CheckpointStore(self.checkpoint_dir(folder), self._console.warn)
            self._opened.enter_context(store.locked())
        checkpointer = Checkpointer(
            store,
            self.models,
            choice_in_force(
                config.checkpointing, metric_in_force(config), validates=loop_config.data.validation is not None
            ),
            partial(self._describe, loggers, folder),
            self._console.warn,
            self._console.message,
            loggers.flush_to_disk,
            self._write_files,
        )
        self._opened.callback(checkpointer.close)
        return checkpointer

    def save_final_weights(self, run_folder: Path, num_steps: int) -> Path:
        """Write the final weights of all trained models, and return the folder of the policy's weights.

        The policy's weights are written last, since they mark the run as complete.
        """
        checkpoint_dir = self.checkpoint_dir(run_folder)
        weights = final_weights_folder(checkpoint_dir, POLICY_ROLE)
        with self._console.phase("saving the final weights"):
            folders = {final_weights_folder(checkpoint_dir, role): model for role, model in self.models.items()}
            left_out = [
                f"{folder}: {left_out_line(name)}"
                for folder, model in reversed(folders.items())
                for name in model.save_weights(folder)
            ]
            self._sign(weights, num_steps)
        for line in left_out:
            self._console.warn(line)
        return weights

    def _sign(self, weights: Path, step: int) -> None:
        """Write the id of the run and the step next to the final weights."""
        # Even after the weights have been written, the disk may be full or the folder removed.
        try:
            (weights / FINAL_RUN_FILE).write_text(f"{json.dumps(self.origin_of_weights(step))}\n", encoding="utf-8")
            add_to_inventory(weights, FINAL_RUN_FILE)
        except (OSError, InventoryError) as error:
            raise CheckpointError(f"{weights}: cannot be written: {one_line(error)}") from None

    def origin_of_weights(self, step: int) -> dict[str, Any]:
        """Return the run's id and its steps, by which the run finds out whether final weights are its own.

        The folder may hold the weights of another training.
        """
        return {"first_run_id": self._first_run_id, "step": step, "num_steps": self.num_steps}

    def checkpoint_dir(self, run_folder: Path) -> Path:
        """Return the folder of checkpoints. It may be in the run's folder."""
        return self._store.folder if self._store is not None else checkpoint_dir_of(self._config, run_folder)

    @property
    def _first_run_id(self) -> str:
        return self.resume.state.first_run_id if self.resume is not None else self._launch.run_id

    def _beginning(self, resume: ResumePoint) -> str:
        if self.is_complete and resume.step < self.num_steps:
            return f"{resume.folder} is the end of this run: its prompts are used up after {resume.step} steps"
        if not self.is_complete and resume.step >= self.num_steps:
            return f"going on from {resume.folder}: all {self.num_steps} steps are done, the final weights are missing"
        return resume.summary(self.num_steps)

    def _write_files(self, checkpoint: Path) -> None:
        for role, model in self.models.items():
            model.write_files(model_folder(checkpoint, role))

    def _describe(self, loggers: FanOutLogger, folder: Path) -> RunDescription:
        return RunDescription(
            algorithm=algorithm_of(self._config).name,
            run_id=self._launch.run_id,
            first_run_id=self._first_run_id,
            run_folder=str(folder.absolute()),
            logger_run_ids=loggers.run_ids,
            config=dump_resolved(self._config),
            layout=layout_of(self._config),
            fingerprints=dict(self._fingerprints),
            versions=collect_versions(),
        )


def _known_store(config: MasterConfig, resume: ResumePoint | None, console: ConsoleLogger) -> CheckpointStore | None:
    """Return the folder of checkpoints, or None if checkpoints are off or go to the run's folder, which does not exist
    yet."""
    if not config.checkpointing.enabled:
        return None
    known = resume.folder.parent if resume is not None else config.checkpointing.checkpoint_dir
    return CheckpointStore(Path(known), console.warn) if known is not None else None

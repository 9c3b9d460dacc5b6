# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Saving of checkpoints in the background, and removal of old ones."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_moe.checkpoints.best_metric import BestMetric, steps_to_remove
from nemo_rl_moe.checkpoints.state import FORMAT_VERSION, CheckpointState, LoopState, RunDescription, write_state
from nemo_rl_moe.checkpoints.store import CheckpointStore, of_history, state_folder
from nemo_rl_moe.config.schema_run import POLICY_ROLE, CheckpointingConfig
from nemo_rl_moe.errors import CheckpointSaveError, one_line
from nemo_rl_moe.runs.folder.folder import read_run_id

Report = Callable[[str], None]
_CLOSING_S = 5.0
_UNRECORDED = "the records of its steps (metrics.jsonl) cannot be written"


class SavedModel(Protocol):
    """The part of a trainable model that saving needs."""

    def start_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None: ...
    def poll_checkpoint(self, *, wait: bool) -> Sequence[str] | None: ...


class Checkpointer:
    """Saves a run's checkpoints in the background, one at a time, and keeps the best.

    Training only waits for the models' snapshots, and for an unfinished earlier save. A save that fails, for example
    on a full disk, is deleted with a warning, and training continues.

    Args:
        models: Role -> model, the policy included.
        describe: Returns the description of the run at the time of saving.
        records_are_on_disk: Flushes the metrics of all steps, such as `FanOutLogger.flush_to_disk`, and returns whether
            all are on disk. If not, the checkpoint is given up. Called in another thread.
        write_beside: Writes further files that make the weights loadable without the run. Called in another thread.

    Attributes:
        longest_save_s: Maximum number of seconds from the beginning of a save to its complete checkpoint, 0 before the
            first.
    """

    def __init__(
        self,
        store: CheckpointStore,
        models: Mapping[str, SavedModel],
        settings: CheckpointingConfig,
        describe: Callable[[], RunDescription],
        warn: Report,
        message: Report,
        records_are_on_disk: Callable[[], bool] = lambda: True,
        write_beside: Callable[[Path], None] = lambda folder: None,
    ):
        self._store = store
        self._models = models
        self._settings = settings
        self._describe = describe
        self._warn = warn
        self._message = message
        self._records_are_on_disk = records_are_on_disk
        self._write_beside = write_beside
        # Waiting for the disk and deleting can take long.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: int | None = None
        self._write_more: Callable[[Path], None] = lambda folder: None
        self._problems: dict[str, Sequence[str]] = {}
        self._publishing: tuple[int, Future[Path | None]] | None = None
        self._saving_since = 0.0
        self.longest_save_s = 0.0
        self._tidying: list[Future[list[str]]] = []
        self._first_run_id = ""
        self._last_started: int | None = None
        self._last_published: Path | None = None
        self._last_failure: str | None = None
        self._metric = BestMetric(settings, warn)

    @property
    def last_published(self) -> Path | None:
        """Newest checkpoint that this run has saved or resumed from."""
        if self._last_published is not None:
            return self._last_published
        own = of_history(self._store.checkpoints(), self._describe().first_run_id)
        return own[-1].folder if own else None

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint follows this step, counted from 1."""
        period = self._settings.save_period
        return period > 0 and step % period == 0

    def start(
        self,
        state: LoopState,
        metrics: Mapping[str, float],
        write_more: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Wait until an earlier save has ended, then begin to save. Do nothing for the step that was saved last.

        Args:
            write_more: Writes further state into the checkpoint's folder. Called in another thread.
        """
        if self._last_started == state.step and self._last_failure is None:
            return
        self.poll(wait=True)
        self._last_started, self._last_failure = state.step, None
        self._saving_since = time.monotonic()
        try:
            staging = self._store.stage(state.step)
            write_state(staging, self._state_to_write(state, metrics))
            folders = {role: state_folder(staging, role) for role in self._models}
            for folder in folders.values():
                folder.mkdir(parents=True)
        except OSError as error:
            self._give_up(state.step, _reason(error))
            return
        for role, model in self._models.items():
            model.start_checkpoint(folders[role], with_optimizer=self._settings.save_optimizer)
        self._writing, self._problems, self._write_more = state.step, {}, write_more

    def poll(self, *, wait: bool = False) -> None:
        """Publish a checkpoint that has been written, and remove old ones. With `wait`, wait for an unfinished save."""
        if self._writing is not None and self._all_are_written(wait=wait):
            step, self._writing = self._writing, None
            if problems := [problem for of_model in self._problems.values() for problem in of_model]:
                self._give_up(step, problems[0])
            else:
                self._publishing = step, self._disk.submit(self._publish, step, self._write_more)
        if self._publishing is not None and (wait or self._publishing[1].done()):
            (step, publishing), self._publishing = self._publishing, None
            try:
                published = publishing.result()
            except Exception as error:  # `write_more` may raise any type
                self._give_up(step, _reason(error))
            else:
                if published is None:
                    self._give_up(step, _UNRECORDED)
                else:
                    self._last_published = published
                    self._message(f"checkpoint of step {step}: {published}")
                    self._tidying.append(self._disk.submit(self._remove_what_is_not_kept))
        while self._tidying and (wait or self._tidying[0].done()):
            for problem in self._tidying.pop(0).result():
                self._warn(problem)

    def finish(self) -> None:
        """Wait until everything is on disk. Nothing can be saved afterwards.

        Raises:
            CheckpointSaveError: The last checkpoint could not be saved.
        """
        self.poll(wait=True)
        self.close()
        if self._last_failure is not None:
            raise CheckpointSaveError(self._last_failure)

    def close(self, timeout_s: float = _CLOSING_S) -> None:
        """End background work, so that other runs can use the folder. An unfinished save is lost, as after a kill."""
        self._disk.shutdown(wait=False, cancel_futures=True)
        running: list[Future[Any]] = [*self._tidying, *([self._publishing[1]] if self._publishing else [])]
        if wait_for(running, timeout_s).not_done:
            self._warn(f"{self._store.folder}: gave up waiting for the disk after {timeout_s:g} s")

    def _all_are_written(self, *, wait: bool) -> bool:
        """Poll the models that are not saved yet. Return whether all saves have ended, with or without success."""
        for role, model in self._models.items():
            if role not in self._problems and (problems := model.poll_checkpoint(wait=wait)) is not None:
                whose = "" if role == POLICY_ROLE else f"role {role}: "
                self._problems[role] = [f"{whose}{problem}" for problem in problems]
        return len(self._problems) == len(self._models)

    def _publish(self, step: int, write_more: Callable[[Path], None]) -> Path | None:
        if not self._records_are_on_disk():
            return None
        self._write_beside(self._store.staged(step))
        write_more(self._store.staged(step))
        published = self._store.publish(step)
        self.longest_save_s = max(self.longest_save_s, time.monotonic() - self._saving_since)
        return published

    def _state_to_write(self, state: LoopState, metrics: Mapping[str, float]) -> CheckpointState:
        run = self._describe()
        self._first_run_id = run.first_run_id
        return CheckpointState(
            **dict(run),
            format_version=FORMAT_VERSION,
            loop=state,
            run_folder_id=read_run_id(Path(run.run_folder)),
            checkpoint_dir=str(self._store.folder.resolve()),
            metric_name=self._settings.metric_name,
            metric_value=self._metric.value(state.step, metrics),
            with_optimizer=self._settings.save_optimizer,
            time=time.time(),
        )

    def _give_up(self, step: int, reason: str) -> None:
        good = self.last_published
        last = f"the last good one is {good}" if good else "there is none yet"
        self._last_failure = f"the checkpoint of step {step} could not be saved: {reason}; {last}"
        self._warn(f"{self._last_failure}; training goes on")
        # Frees space on a full disk before the next save.
        self._tidying.append(self._disk.submit(self._discard, step))

    def _discard(self, step: int) -> list[str]:
        try:
            self._store.discard(step)
        except OSError as error:
            return [f"the unfinished save of step {step} in {self._store.folder} cannot be deleted: {_reason(error)}"]
        return []

    def _remove_what_is_not_kept(self) -> list[str]:
        checkpoints = self._store.checkpoints()
        own = of_history(checkpoints, self._first_run_id)
        unwanted = [checkpoint.step for checkpoint in checkpoints if checkpoint not in own]
        name = self._settings.metric_name
        values = [(point.step, point.state.metric_value if point.state.metric_name == name else None) for point in own]
        unwanted += steps_to_remove(values, self._settings.keep_top_k, higher_is_better=self._settings.higher_is_better)
        problems = []
        for step in unwanted:
            try:
                self._store.remove(step)
            except OSError as error:
                problems.append(f"{self._store.path_of(step)} cannot be deleted: {_reason(error)}")
        return problems


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else one_line(error)

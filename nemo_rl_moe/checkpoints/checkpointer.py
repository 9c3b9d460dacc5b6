# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints while training goes on."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_moe.algorithms.loop_state import LoopState
from nemo_rl_moe.checkpoints.errors import CheckpointSaveError
from nemo_rl_moe.checkpoints.retention import steps_to_remove
from nemo_rl_moe.checkpoints.state import FORMAT_VERSION, CheckpointState, json_ready, loop_state_record, write_state
from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME, CheckpointStore
from nemo_rl_moe.config.schema_run import CheckpointingConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest

Tell = Callable[[str], None]


class Outcome(Protocol):
    """How the writing of a policy's part ended."""

    @property
    def problem(self) -> str | None: ...


class CheckpointedPolicy(Protocol):
    """The part of `PolicyInterface` that saving needs."""

    def start_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None: ...
    def poll_checkpoint(self, *, wait: bool) -> Outcome | None: ...


@dataclass(frozen=True)
class RunDescription:
    """What each checkpoint of a run says of the run; see `CheckpointState`.

    Attributes:
        algorithm: The configuration's own section.
        run_id: The run.
        first_run_id: Of a resumed run, its checkpoint's; otherwise the run's own.
        run_folder: The run's folder.
        logger_run_ids: Logger's name to the id under which its run goes on.
        config: The resolved configuration.
        layout: Of `layout_of`.
        fingerprints: Input's name to its fingerprint.
        versions: Of Python and of the packages.
    """

    algorithm: str
    run_id: str
    first_run_id: str
    run_folder: Path
    logger_run_ids: Mapping[str, str]
    config: Mapping[str, Any]
    layout: Mapping[str, int]
    fingerprints: Mapping[str, str]
    versions: Mapping[str, Any]


class Checkpointer:
    """Saves when told to, one checkpoint at a time, and keeps the best ones.

    Training waits only while the policy takes its snapshot, and where one checkpoint is due before the last one is on
    the disk. A save that fails is told and given up: what it wrote is deleted, and training goes on.

    Args:
        store: Where to; locked by this process.
        policy: What is saved.
        settings: The `checkpointing` section.
        describe: Gives what the checkpoint says of the run, at the time of saving.
        warn: Gets what went wrong, a line each.
        message: Gets a line for each checkpoint that was saved.
    """

    def __init__(
        self,
        store: CheckpointStore,
        policy: CheckpointedPolicy,
        settings: CheckpointingConfig,
        describe: Callable[[], RunDescription],
        warn: Tell,
        message: Tell,
    ):
        self._store = store
        self._policy = policy
        self._settings = settings
        self._describe = describe
        self._warn = warn
        self._message = message
        # Waiting for a disk, and deleting much, takes long: it happens beside the training.
        self._disk_worker = ThreadPoolExecutor(1, "checkpoints")
        self._writing: int | None = None
        self._publishing: tuple[int, Future[Path]] | None = None
        self._tidying: list[Future[list[str]]] = []
        self._first_run_id = ""
        self._last_started: int | None = None
        self._last_published: Path | None = None
        self._last_failure: str | None = None
        self._has_told_of_metric = False

    @property
    def last_published(self) -> Path | None:
        """The newest checkpoint that this run has saved or has gone on from; None where there is none."""
        if self._last_published is not None:
            return self._last_published
        history = self._describe().first_run_id
        own = [found.folder for found in self._store.checkpoints() if found.state.first_run_id == history]
        return own[-1] if own else None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step, counted from 1."""
        period = self._settings.save_period
        return period > 0 and step % period == 0

    def start(self, state: LoopState, metrics: Mapping[str, float]) -> None:
        """Begins to save; waits for an earlier checkpoint first. Does nothing for the step that was saved last.

        Args:
            state: Where the loop stands.
            metrics: The step's, by complete key.
        """
        if self._last_started == state.step and self._last_failure is None:
            return
        self.poll(wait=True)
        self._last_started, self._last_failure = state.step, None
        try:
            staging = self._store.stage(state.step)
            write_state(staging, self._state_to_write(state, metrics))
            (staging / POLICY_FOLDER_NAME).mkdir()
        except OSError as error:
            self._give_up(state.step, _reason(error))
            return
        self._policy.start_checkpoint(staging / POLICY_FOLDER_NAME, with_optimizer=self._settings.save_optimizer)
        self._writing = state.step

    def poll(self, *, wait: bool = False) -> None:
        """Brings what is written into existence, and removes what is no longer to be kept.

        Args:
            wait: Come back only when nothing is being saved any more.
        """
        if self._writing is not None:
            outcome = self._policy.poll_checkpoint(wait=wait)
            if outcome is not None:
                step, self._writing = self._writing, None
                if outcome.problem is None:
                    self._publishing = step, self._disk_worker.submit(self._store.publish, step)
                else:
                    self._give_up(step, outcome.problem)
        if self._publishing is not None and (wait or self._publishing[1].done()):
            (step, publishing), self._publishing = self._publishing, None
            try:
                self._last_published = publishing.result()
            except OSError as error:
                self._give_up(step, _reason(error))
            else:
                self._message(f"checkpoint of step {step}: {self._last_published}")
                self._tidying.append(self._disk_worker.submit(self._remove_what_is_not_kept))
        while self._tidying and (wait or self._tidying[0].done()):
            for problem in self._tidying.pop(0).result():
                self._warn(problem)

    def finish(self) -> None:
        """Waits until everything is on the disk. Nothing can be saved afterwards.

        Raises:
            CheckpointSaveError: The last checkpoint could not be saved.
        """
        self.poll(wait=True)
        self._disk_worker.shutdown(wait=True)
        if self._last_failure is not None:
            raise CheckpointSaveError(self._last_failure)

    def _state_to_write(self, state: LoopState, metrics: Mapping[str, float]) -> CheckpointState:
        run = self._describe()
        self._first_run_id = run.first_run_id
        return CheckpointState(
            format_version=FORMAT_VERSION,
            algorithm=run.algorithm,
            loop=loop_state_record(state),
            run_id=run.run_id,
            first_run_id=run.first_run_id,
            run_folder=str(run.run_folder.absolute()),
            logger_run_ids=dict(run.logger_run_ids),
            metric_name=self._settings.metric_name,
            metric_value=self._metric_value(state.step, metrics),
            with_optimizer=self._settings.save_optimizer,
            config=json_ready(run.config),
            layout=dict(run.layout),
            fingerprints=dict(run.fingerprints),
            versions=json_ready(run.versions),
            time=time.time(),
        )

    def _metric_value(self, step: int, metrics: Mapping[str, float]) -> float | None:
        name = self._settings.metric_name
        if name is None:
            return None
        source, _, rest = name.partition(":")
        value = metrics.get(f"{source}/{rest}")
        if value is not None:
            return float(value)
        measured = [f"{source}:{key.removeprefix(f'{source}/')}" for key in metrics if key.startswith(f"{source}/")]
        if measured and not self._has_told_of_metric:
            self._has_told_of_metric = True
            self._warn(
                f"checkpointing.metric_name: {name} is not among the metrics of step {step}, so that its checkpoint"
                f" ranks below those that have it{did_you_mean(nearest(name, measured))}"
            )
        return None

    def _give_up(self, step: int, reason: str) -> None:
        good = self.last_published
        last = f"the last good one is {good}" if good else "there is none yet"
        self._last_failure = f"the checkpoint of step {step} could not be saved: {reason}; {last}"
        self._warn(f"{self._last_failure}; training goes on")
        # A full disk gets its space back before the next one is tried.
        self._tidying.append(self._disk_worker.submit(self._discard, step))

    def _discard(self, step: int) -> list[str]:
        try:
            self._store.discard(step)
        except OSError as error:
            return [f"what was written of step {step} in {self._store.folder} cannot be deleted: {_reason(error)}"]
        return []

    def _remove_what_is_not_kept(self) -> list[str]:
        checkpoints = self._store.checkpoints()
        own = [checkpoint for checkpoint in checkpoints if checkpoint.state.first_run_id == self._first_run_id]
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


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

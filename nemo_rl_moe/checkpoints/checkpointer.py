# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One thread for slow work on a disk, which never keeps a program from ending."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nemo_rl_moe.checkpoints.best_metric import ChosenMetric, steps_to_remove
from nemo_rl_moe.checkpoints.state import (
    FORMAT_VERSION,
    CheckpointState,
    LoopState,
    json_ready,
    loop_state_record,
    write_state,
)
from nemo_rl_moe.checkpoints.store import POLICY_FOLDER_NAME, CheckpointStore, of_history
from nemo_rl_moe.config.schema_run import CheckpointingConfig
from nemo_rl_moe.errors import CheckpointSaveError
from nemo_rl_moe.run_folder.folder import read_run_id

Result = TypeVar("Result")


class DiskThread:
    """Does one thing after the other, beside the caller.

    A `ThreadPoolExecutor` would hold up the interpreter's exit for as long as a disk does not answer.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Has something done; cancelled where the thread is closed before its turn."""
        future: Future[Result] = Future()
        if self._is_closed.is_set():
            future.cancel()
        else:
            self._work.put((future, lambda: action(*arguments)))
        return future

    def close(self, timeout_s: float) -> bool:
        """Lets the thread finish what it is at and drops the rest; returns whether it has ended in so many seconds."""
        self._is_closed.set()
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, action = item
            if self._is_closed.is_set():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except BaseException as error:
                    future.set_exception(error)


Tell = Callable[[str], None]
_CLOSING_S = 5.0
_UNRECORDED = "the records of its steps (metrics.jsonl) cannot be written"


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
        records_are_on_disk: Forces the records of all steps to the disk, and says whether all are there: only then
            does a checkpoint come into existence. Called in another thread; `FanOutLogger.flush_to_disk` is one.
        write_beside: Puts further files into a checkpoint's folder: those by which its weights can be loaded without
            the run. Called in another thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        policy: CheckpointedPolicy,
        settings: CheckpointingConfig,
        describe: Callable[[], RunDescription],
        warn: Tell,
        message: Tell,
        records_are_on_disk: Callable[[], bool] = lambda: True,
        write_beside: Callable[[Path], None] = lambda folder: None,
    ):
        self._store = store
        self._policy = policy
        self._settings = settings
        self._describe = describe
        self._warn = warn
        self._message = message
        # Waiting for a disk, and deleting much, takes long: it happens beside the training.
        self._records_are_on_disk = records_are_on_disk
        self._write_beside = write_beside
        self._disk = DiskThread()
        self._writing: int | None = None
        self._publishing: tuple[int, Future[Path | None]] | None = None
        self._held_back: int | None = None
        self._saving_since: float | None = None
        self._longest_save_s = 0.0
        self._tidying: list[Future[list[str]]] = []
        self._first_run_id = ""
        self._last_started: int | None = None
        self._last_published: Path | None = None
        self._last_failure: str | None = None
        self._metric = ChosenMetric(settings, warn)

    @property
    def last_published(self) -> Path | None:
        """The newest checkpoint that this run has saved or has gone on from; None where there is none."""
        if self._last_published is not None:
            return self._last_published
        history = self._describe().first_run_id
        own = of_history(self._store.checkpoints(), history)
        return own[-1].folder if own else None

    @property
    def longest_save_s(self) -> float:
        """Seconds from the beginning of a save until its checkpoint was whole, of the slowest one; 0: none yet."""
        return self._longest_save_s

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
        self._give_up_what_is_held_back()
        self._last_started, self._last_failure = state.step, None
        self._saving_since = time.monotonic()
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
                    self._held_back = step
                else:
                    self._give_up(step, outcome.problem)
        if self._held_back is not None:
            step, self._held_back = self._held_back, None
            self._publishing = step, self._disk.submit(self._publish, step)
        if self._publishing is not None and (wait or self._publishing[1].done()):
            (step, publishing), self._publishing = self._publishing, None
            try:
                published = publishing.result()
            except OSError as error:
                self._give_up(step, _reason(error))
            else:
                self._take_in(step, published)
        while self._tidying and (wait or self._tidying[0].done()):
            for problem in self._tidying.pop(0).result():
                self._warn(problem)

    def finish(self) -> None:
        """Waits until everything is on the disk. Nothing can be saved afterwards.

        Raises:
            CheckpointSaveError: The last checkpoint could not be saved.
        """
        self.poll(wait=True)
        self._give_up_what_is_held_back()
        self.poll(wait=True)
        self.close()
        if self._last_failure is not None:
            raise CheckpointSaveError(self._last_failure)

    def close(self, timeout_s: float = _CLOSING_S) -> None:
        """Ends what is done beside the training, in bounded time; to be called before others may use the folder.

        What is not saved yet stays unsaved, as after a kill. A second call does nothing.

        Args:
            timeout_s: Seconds to wait for the disk.
        """
        if not self._disk.close(timeout_s):
            self._warn(f"{self._store.folder}: the disk has not answered for {timeout_s:g} s and is not waited for")

    def _publish(self, step: int) -> Path | None:
        if not self._records_are_on_disk():
            return None
        self._write_beside(self._store.staged(step))
        published = self._store.publish(step)
        if self._saving_since is not None:
            self._longest_save_s = max(self._longest_save_s, time.monotonic() - self._saving_since)
        return published

    def _take_in(self, step: int, published: Path | None) -> None:
        if published is None:
            # A later poll tries again; the wait for the records is not one for saving.
            self._held_back, self._saving_since = step, None
            return
        self._last_published = published
        self._message(f"checkpoint of step {step}: {published}")
        self._tidying.append(self._disk.submit(self._remove_what_is_not_kept))

    def _give_up_what_is_held_back(self) -> None:
        if self._held_back is not None:
            step, self._held_back = self._held_back, None
            self._give_up(step, _UNRECORDED)

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
            run_folder_id=read_run_id(run.run_folder),
            checkpoint_dir=str(self._store.folder.resolve()),
            logger_run_ids=dict(run.logger_run_ids),
            metric_name=self._settings.metric_name,
            metric_value=self._metric.value(state.step, metrics, is_due=self.is_due(state.step)),
            with_optimizer=self._settings.save_optimizer,
            config=json_ready(run.config),
            layout=dict(run.layout),
            fingerprints=dict(run.fingerprints),
            versions=json_ready(run.versions),
            time=time.time(),
        )

    def _give_up(self, step: int, reason: str) -> None:
        good = self.last_published
        last = f"the last good one is {good}" if good else "there is none yet"
        self._last_failure = f"the checkpoint of step {step} could not be saved: {reason}; {last}"
        self._warn(f"{self._last_failure}; training goes on")
        # A full disk gets its space back before the next one is tried.
        self._tidying.append(self._disk.submit(self._discard, step))

    def _discard(self, step: int) -> list[str]:
        try:
            self._store.discard(step)
        except OSError as error:
            return [f"what was written of step {step} in {self._store.folder} cannot be deleted: {_reason(error)}"]
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


def _reason(error: OSError) -> str:
    return error.strerror or str(error)

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything of a training run except its loop: model, workers, resume point, run folder, loggers, checkpoints, final
weights."""

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.algorithms.step_recorder import RecordSinks, RunSummary, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.checkpoints.time_limit import TimeLimit
from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.notices import notices
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.config.schema_grpo import GenerationLoggerConfig
from nemo_rl_moe.config.schema_run import POLICY_ROLE
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.errors import TrainingDivergedError
from nemo_rl_moe.launch.roles import prepare_role, start_role
from nemo_rl_moe.launch.saved_training import SavedTraining
from nemo_rl_moe.launch.setup import (
    EFFECTIVE_MOE_FILE,
    MOE_SOURCES_FILE,
    ModelRun,
    PreparedModel,
    announce_moe,
    summarise,
)
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.runs.folder.failures import FailureWriter
from nemo_rl_moe.runs.folder.folder import create_run_folder, find_run_folder, write_run_files
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.loggers.artifacts import ArtifactTables
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import LoggerResume, build_loggers, find_custom_backends
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.report.run_findings import scoring_lines

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy, TrainableModel
    from nemo_rl_moe.models.policy.model_workers import ModelWorkers

DIVERGED_SAMPLES_FILE = "diverged_samples.json"
_NOTHING_SAVED = -1
"""Number of a step before the first step, for a restart of a run that has saved nothing."""


class TrainingRun(ModelRun):
    """One run of any algorithm, without the algorithm's loop.

    An algorithm's entry point calls `prepare_model`, reads the data, and calls `begin`, `start_policy`, `restore` and
    `open`. `open` returns the recorder for the loop. After the loop it calls `end` with the loop's summary. The run is
    a context manager. At its end, everything that these methods and `use` opened is closed in reverse order.

    Entering the context finds the checkpoint from which the run resumes, before a model or data is read, and locks the
    run's checkpoints. It raises a CheckpointError if the run cannot continue from the checkpoint.

    Args:
        stop_signals: Requests to stop. After `open`, the first request only ends the loop at the end of a step.

    Attributes:
        saved: The checkpoint from which the run resumes, and the run's own checkpoints.
    """

    def __init__(self, config: MasterConfig, launch: RunLaunch, stop_signals: StopSignals):
        super().__init__(config, ConsoleLogger(total_steps=0, live=config.logger.console.live))
        self.algorithm = algorithm_of(config)
        self.saved = SavedTraining(config, launch, self.console, self._opened)
        self._launch, self._stop_signals = launch, stop_signals
        self._folder: Path | None = None
        self._ending: str | None = None
        self._loggers: FanOutLogger | None = None

    def __enter__(self) -> "TrainingRun":
        try:
            find_custom_backends(self.config.logger)
            self.saved.claim()
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if isinstance(error, TrainingDivergedError) and self._folder is not None:
            raise TrainingDivergedError(f"{error}{_all_samples(error, self._folder)}", error.sample_ids) from None
        if error is None and self._ending is not None:
            if self._cluster is not None:
                self._cluster.let_die()
            self.console.message(self._ending)

    def stop_reason(self) -> str | None:
        """Return the request to stop after the current step, or None."""
        return self._stop_signals.reason()

    def prepare_role(self, role: str) -> PreparedModel:
        """Fetch, check and return the model of a role. `prepare_model` must have been called."""
        assert self._model is not None
        return prepare_role(self.config, role, self._model, self.console)

    def start_role(self, role: str, model: PreparedModel) -> "ModelWorkers":
        """Start the workers of a role, and return them. The policy's workers must have been started."""
        from nemo_rl_moe.models.policy.model_workers import ModelWorkers  # imports Megatron-Core, which takes seconds

        return start_role(self, role, model, ModelWorkers)

    def start_trainable_role(
        self, role: str, model: PreparedModel, heads: Collection[Head] = (Head.LOGPROBS,)
    ) -> "TrainableModel":
        """Start the workers of a role that trains, and return its model. Call this after `start_policy` and before
        `restore`.

        The model trains in every step of the run. It is saved with the run's checkpoints and resumed from them.
        """
        from nemo_rl_moe.models.policy.lm_policy import TrainableModel  # imports Megatron-Core, which takes seconds

        make = partial(
            TrainableModel,
            model_files=model.files,
            kept=model.kept,
            seed=self.algorithm.loop_of(self.config).seed,
            num_steps=self.algorithm.num_updates(self.config, self.num_steps),
            heads=heads,
        )
        started = start_role(self, role, model, make)
        self.saved.models[role] = started
        return started

    def begin(self, num_steps: int, fingerprints: Mapping[str, str], num_samples: int | None = None) -> None:
        """Report the first step of the run, and notices about its settings. Writes no files.

        Args:
            fingerprints: Name of an input -> a text that changes with the input, for inputs on which a resumed run
                relies.
            num_samples: Number of samples in an epoch that is divided into complete batches, so that some samples may
                be skipped. None: no sample is skipped.
        """
        self.saved.begin(num_steps, fingerprints)
        if not self.is_complete:
            loop_config: Any = self.config  # every algorithm has a loop and data
            for line in notices(loop_config, num_steps, num_samples):
                self.console.warn(line)
        self.console.begin(num_steps)

    @property
    def num_steps(self) -> int:
        """Number of steps of the complete run, known after `begin`."""
        return self.saved.num_steps

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run has finished and written the final weights."""
        return self.saved.is_complete

    @property
    def remaining_steps(self) -> range:
        """The steps that are left: from the number of steps done to the number of steps of the complete run."""
        return range(self.saved.resume.step if self.saved.resume is not None else 0, self.num_steps)

    def start_policy(self) -> "MegatronPolicy":
        """Start Ray and the workers of the policy, and return the policy."""
        policy = self._start_workers(
            seed=self.algorithm.loop_of(self.config).seed,
            num_steps=self.algorithm.num_policy_updates(self.config, self.num_steps),
            keep_reference=self.algorithm.needs_reference(self.config),
        )
        self.saved.models[POLICY_ROLE] = policy
        return policy

    def restore(self) -> None:
        """Load the checkpoint into the trained models. See `SavedTraining.restore`."""
        self.saved.restore()

    def open(self) -> StepRecorder:
        """Open the run's folder, loggers and checkpoints, show the effective settings, and return the recorder for the
        loop.

        A resumed run continues in its folder. Records of steps after the checkpoint are removed.
        """
        policy, config = self._policy, self.config
        assert policy is not None  # `start_policy` has been called
        self._folder, resume = self._run_folder()
        resolved = dump_resolved(config)
        resumed_at = None if resume is None or resume.step == _NOTHING_SAVED else resume.step
        moe_files = {EFFECTIVE_MOE_FILE: policy.moe_configuration, MOE_SOURCES_FILE: policy.moe_configuration_sources}
        write_run_files(self._folder, resolved, moe_files, resumed_at)
        announce_moe(self.console, policy.moe_configuration, policy.moe_configuration_sources)
        self.console.message(f"writing to {self._folder}")
        topk = policy.moe_configuration.get("moe_router_topk")
        self._loggers = self.use(build_loggers(config.logger, self._folder, self.console, resume, topk=topk))
        self._loggers.log_config(resolved)
        return self._recorder(self._loggers, self._folder)

    @property
    def folder(self) -> Path:
        """The run's folder, known after `open`."""
        assert self._folder is not None
        return self._folder

    def end(self, summary: RunSummary) -> None:
        """Write the final weights if the run is complete, and prepare the summary that is printed when everything is
        closed."""
        assert self._folder is not None
        folder, saves = self._folder, self.config.checkpointing.enabled
        scoring = scoring_lines(folder)
        if summary.stopped_for is not None:
            if summary.num_steps == 0:
                self._stop_signals.end_now()  # there is nothing to keep, so the run ends as before the loop
            checkpoint_dir = self.saved.checkpoint_dir(folder) if saves else None
            self._ending = "\n".join([self._stopped(summary, checkpoint_dir), *scoring])
            return
        weights = self.saved.save_final_weights(folder, summary.num_steps) if saves else None
        self._ending = summarise(
            self.config, summary, folder, weights, scoring, loggers=self._loggers.active if self._loggers else ()
        )

    def _run_folder(self) -> tuple[Path, LoggerResume | None]:
        log_dir, run_id, resume = self.config.logger.log_dir, self._launch.run_id, self.saved.resume
        if resume is not None:
            if resume.run_folder is not None:
                rewind_run_folder(resume.run_folder, resume.step)
                return resume.run_folder, LoggerResume(resume.step, resume.state.logger_run_ids)
            # The folder is missing or belongs to another run. An earlier launch of this run may have made a new folder.
            if (earlier := find_run_folder(log_dir, run_id)) is not None:
                rewind_run_folder(earlier, resume.step)
                return earlier, LoggerResume(resume.step, {})
        elif (earlier := find_run_folder(log_dir, run_id)) is not None:
            # An earlier launch of this run has begun, but has saved nothing.
            rewind_run_folder(earlier, _NOTHING_SAVED)
            return earlier, LoggerResume(_NOTHING_SAVED, {})
        return create_run_folder(log_dir, run_id, self.algorithm.name), None

    def _recorder(self, loggers: FanOutLogger, folder: Path) -> StepRecorder:
        settings = self.config.checkpointing
        # Entered first, so that it is left last: a request to stop must not interrupt the last writes after the loop.
        self.use(self._stop_signals.graceful())
        sinks = self._record_sinks(loggers, folder)
        checkpointer = self.saved.open_checkpointer(loggers, folder) if settings.enabled else None
        time_limit = TimeLimit(settings.checkpoint_must_save_by, self._launch.started)

        def stop_reason() -> str | None:
            if checkpointer is not None:
                time_limit.note_saving(checkpointer.longest_save_s)
            is_up = time_limit.is_up_after_step()
            return self._stop_signals.reason() or ("checkpointing.checkpoint_must_save_by" if is_up else None)

        return StepRecorder(
            sinks,
            checkpointer,
            stop_reason,
            self.config.policy.max_consecutive_skipped_updates,
            self.saved.resume.state.loop if self.saved.resume is not None else LoopState(),
        )

    def _record_sinks(self, loggers: FanOutLogger, folder: Path) -> RecordSinks:
        tables = ArtifactTables(folder, self.console.warn, self.console.message)
        self._opened.callback(tables.close)

        def log_artifact(step: int, name: str, artifact: Any) -> None:
            tables.write(step, name, artifact)
            loggers.log_artifact(step, name, artifact)

        failures = FailureWriter(folder, self.console.warn, self.console.message)
        self._opened.callback(failures.close)

        def log_failures(step: int, failed: FailedResponses) -> None:
            failures.write(step, failed)
            loggers.log_failures(failed)

        settings = self.config.logger
        if not isinstance(settings, GenerationLoggerConfig):
            return RecordSinks(loggers, log_artifact, flush=tables.flush)
        samples = self.use(SampleLog(folder, self.console, settings.num_samples_to_print, settings.num_samples_to_save))
        show_samples = partial(loggers.log_samples, samples.shown)
        return RecordSinks(loggers, log_artifact, samples.write, tables.flush, log_failures, show_samples)

    def _stopped(self, summary: RunSummary, checkpoint_dir: Path | None) -> str:
        stopped = f"\nstopped after step {summary.num_steps} of {self.num_steps} ({summary.stopped_for})"
        if checkpoint_dir is None:
            return f"{stopped}; nothing was saved (checkpointing.enabled: false)"
        again = "run the same command again"
        if self.config.checkpointing.resume != "auto":
            again = "run it again with checkpointing.resume=auto"
        return f"{stopped}; saved to {checkpoint_dir / f'step_{summary.num_steps}'}. To go on, {again}."


def _all_samples(error: TrainingDivergedError, run_folder: Path) -> str:
    """Write the ids of the step's samples to a file, and return a line with its path, or an empty text if that
    fails."""
    path = run_folder / DIVERGED_SAMPLES_FILE
    try:
        path.write_text(json.dumps({"sample_ids": error.sample_ids}, indent=1) + "\n", encoding="utf-8")
    except OSError:
        return ""
    return f"\nAll samples of the step: {path}"

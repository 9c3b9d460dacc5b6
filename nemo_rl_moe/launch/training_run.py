# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run around its loop: where it begins, where it writes, what it keeps, and how it ends."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.step_recorder import Observers, RunSummary, StepRecorder
from nemo_rl_moe.checkpoints.changes import changed_inputs
from nemo_rl_moe.checkpoints.checkpointer import Checkpointer, RunDescription
from nemo_rl_moe.checkpoints.resume import ResumePoint, checkpoint_dir_of, find_resume_point
from nemo_rl_moe.checkpoints.state import LoopState, layout_of
from nemo_rl_moe.checkpoints.store import FINAL_WEIGHTS_FOLDER, CheckpointStore
from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.errors import TrainingDivergedError
from nemo_rl_moe.launch.driver_process import RunLaunch, StopSignals, TimeLimit
from nemo_rl_moe.launch.setup import EFFECTIVE_MOE_FILE, MOE_SOURCES_FILE, announce, summarise
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.loggers.factory import LoggerResume, build_loggers
from nemo_rl_moe.loggers.fan_out import FanOutLogger
from nemo_rl_moe.models.model_files import left_out_line, write_model_files
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.moe.load_statistics import ExpertLoad
from nemo_rl_moe.run_folder.expert_load import ExpertLoadWriter
from nemo_rl_moe.run_folder.folder import collect_versions, create_run_folder, find_run_folder, write_run_files
from nemo_rl_moe.run_folder.rewind import rewind_run_folder

FINAL_RUN_FILE = "training_run.json"
"""Beside the final weights: which training they are the end of."""
DIVERGED_SAMPLES_FILE = "diverged_samples.json"
_NOTHING_KEPT = -1
"""A step before the first one, for an attempt that follows one which has saved nothing."""


@dataclass(frozen=True)
class Run:
    """What a run is, before anything of it has been started.

    Attributes:
        config: The configuration.
        algorithm: The name of its own section.
        attempt: Which run this is, and which of its attempts.
        stop_signals: Tell when the run is asked to stop.
        console: Shows the run.
        num_steps: Steps of the whole run.
        fingerprints: Texts that change when an input does which a resumed run relies on.
        resume: The checkpoint that it goes on from; None: it begins anew.
        store: The folder of checkpoints, locked for this run; None while there is no such folder.
    """

    config: MasterConfig
    algorithm: str
    attempt: RunLaunch
    stop_signals: StopSignals
    console: ConsoleLogger
    num_steps: int
    fingerprints: Mapping[str, str]
    resume: ResumePoint | None
    store: CheckpointStore | None

    @property
    def is_complete(self) -> bool:
        """Whether an earlier run has come to its end and has written the final weights."""
        if self.resume is None:
            return False
        final = self.resume.folder.parent / FINAL_WEIGHTS_FOLDER / FINAL_RUN_FILE
        try:
            written: Any = json.loads(final.read_bytes())
        except (OSError, ValueError):
            return False
        expected = self.origin_of_weights(self.resume.step)
        if self.resume.step >= self.num_steps and isinstance(written, dict):
            expected["num_steps"] = written.get("num_steps")  # fewer steps than were done ask for nothing more
        return bool(written == expected)

    def origin_of_weights(self, step: int) -> dict[str, Any]:
        """Says which training made the final weights: weights of another one may stand in the same folder."""
        return {"first_run_id": self.first_run_id, "step": step, "num_steps": self.num_steps}

    def checkpoint_dir(self, run_folder: Path) -> Path:
        """Where the run's checkpoints are."""
        return self.store.folder if self.store is not None else checkpoint_dir_of(self.config, run_folder)

    @property
    def first_run_id(self) -> str:
        """The run at the beginning of this history of training."""
        return self.resume.state.first_run_id if self.resume is not None else self.attempt.run_id


@contextmanager
def prepared_run(
    config: MasterConfig,
    attempt: RunLaunch,
    stop_signals: StopSignals,
    console: ConsoleLogger,
    num_steps: int,
    fingerprints: Mapping[str, str],
) -> Iterator[Run]:
    """Finds out where the run begins, and tells it. While open, no other run writes to its checkpoints.

    Nothing of the run's own is written.

    Raises:
        CheckpointError: The run cannot go on from the checkpoints that are there.
    """
    resume = find_resume_point(config, attempt.run_id, attempt.restart_number, console.warn)
    algorithm = algorithm_of(config).name
    with ExitStack() as stack:
        store = _existing_store(config, resume, console)
        if store is not None:
            stack.enter_context(store.locked())
            store.sweep()
        run = Run(config, algorithm, attempt, stop_signals, console, num_steps, fingerprints, resume, store)
        if resume is not None:
            for line in changed_inputs(resume.state.fingerprints, fingerprints):
                console.warn(line)
            if resume.run_folder is not None and resume.run_folder.parent.resolve() != _log_dir(config):
                console.warn(f"logger.log_dir is {config.logger.log_dir}, and the run goes on in {resume.run_folder}")
            console.message(_beginning(run, resume))
        console.begin(num_steps)
        yield run


def _log_dir(config: MasterConfig) -> Path:
    return Path(config.logger.log_dir).resolve()


def _existing_store(config: MasterConfig, resume: ResumePoint | None, console: ConsoleLogger) -> CheckpointStore | None:
    """The folder of checkpoints where it is known and there; one in a run's folder is made with that."""
    if not config.checkpointing.enabled:
        return None
    known = resume.folder.parent if resume is not None else config.checkpointing.checkpoint_dir
    return CheckpointStore(Path(known), console.warn) if known is not None and Path(known).is_dir() else None


def _beginning(run: Run, resume: ResumePoint) -> str:
    if run.is_complete and resume.step < run.num_steps:
        return f"{resume.folder} is the end of this run: its prompts are used up after {resume.step} steps"
    if not run.is_complete and resume.step >= run.num_steps:
        return f"going on from {resume.folder}: all {run.num_steps} steps are done, the final weights are missing"
    return resume.summary(run.num_steps)


def restore(run: Run, policy: MegatronPolicy) -> None:
    """Puts the policy where the checkpoint has left it; the reference model stays the one that the run began with.

    Raises:
        CheckpointError: The checkpoint is damaged, holds anything but tensors, or belongs to another model.
    """
    if run.resume is not None:
        with run.console.phase(f"loading {run.resume.folder}"):
            policy.load_checkpoint(run.resume.policy_folder, with_optimizer=run.resume.state.with_optimizer)


@contextmanager
def open_run(run: Run, policy: MegatronPolicy) -> Iterator[tuple[Path, FanOutLogger]]:
    """The run's folder and its loggers; tells what is in force and where it is written.

    A resumed run goes on in its folder: what that holds of later steps is cut off, and the loggers continue.
    """
    run_folder, resume = _run_folder(run)
    resolved = dump_resolved(run.config)
    resumed_at = None if resume is None or resume.step == _NOTHING_KEPT else resume.step
    moe_files = {EFFECTIVE_MOE_FILE: policy.moe_configuration, MOE_SOURCES_FILE: policy.moe_configuration_sources}
    write_run_files(run_folder, resolved, moe_files, resumed_at)
    announce(run.console, policy.moe_configuration, policy.moe_configuration_sources, run_folder)
    topk = policy.moe_configuration.get("moe_router_topk")
    with build_loggers(run.config.logger, run_folder, run.console, resume, topk=topk) as loggers:
        loggers.log_config(resolved)
        yield run_folder, loggers


def _run_folder(run: Run) -> tuple[Path, LoggerResume | None]:
    log_dir, run_id = run.config.logger.log_dir, run.attempt.run_id
    if run.resume is not None:
        if run.resume.run_folder is not None:
            rewind_run_folder(run.resume.run_folder, run.resume.step)
            return run.resume.run_folder, LoggerResume(run.resume.step, run.resume.state.logger_run_ids)
        # Its folder is gone or another's; an attempt before this one may have made a new one.
        if (earlier := find_run_folder(log_dir, run_id)) is not None:
            rewind_run_folder(earlier, run.resume.step)
            return earlier, LoggerResume(run.resume.step, {})
    elif (earlier := find_run_folder(log_dir, run_id)) is not None:
        # An attempt before this one has begun, but has saved nothing.
        rewind_run_folder(earlier, _NOTHING_KEPT)
        return earlier, LoggerResume(_NOTHING_KEPT, {})
    return create_run_folder(log_dir, run_id, run.algorithm), None


@contextmanager
def keeping(
    run: Run,
    policy: MegatronPolicy,
    run_folder: Path,
    loggers: FanOutLogger,
    log_samples: Callable[[int, str, Sequence[Any]], None] = lambda step, split, samples: None,
) -> Iterator[StepRecorder]:
    """Ends the steps of the run; inside, a first request to stop only ends the loop after its step."""
    settings = run.config.checkpointing
    time_limit = TimeLimit(settings.checkpoint_must_save_by, run.attempt.started)
    with run.stop_signals.graceful(), ExitStack() as stack:
        expert_load = ExpertLoadWriter(run_folder, run.console.warn, run.console.message)
        stack.callback(expert_load.close)

        def log_expert_load(step: int, load: ExpertLoad) -> None:
            expert_load.write(step, load)
            loggers.log_expert_load(step, load)

        checkpointer = None
        if settings.enabled:
            checkpointer = _open_checkpointer(run, policy, run_folder, loggers, stack)

        def stop_reason() -> str | None:
            if checkpointer is not None:
                time_limit.note_saving(checkpointer.longest_save_s)
            is_up = time_limit.is_up_after_step()
            return run.stop_signals.reason() or ("checkpointing.checkpoint_must_save_by" if is_up else None)

        recorder = StepRecorder(
            Observers(loggers, log_expert_load, log_samples),
            checkpointer,
            stop_reason,
            run.config.policy.max_consecutive_skipped_updates,
            run.resume.state.loop_state if run.resume is not None else LoopState(),
        )
        try:
            yield recorder
        except TrainingDivergedError as error:
            raise TrainingDivergedError(f"{error}{_all_samples(error, run_folder)}", error.sample_ids) from None


def _open_checkpointer(
    run: Run, policy: MegatronPolicy, run_folder: Path, loggers: FanOutLogger, stack: ExitStack
) -> Checkpointer:
    """Saves for the run; the stack closes it before it lets go of the folder."""
    store = run.store
    if store is None:
        store = CheckpointStore(run.checkpoint_dir(run_folder), run.console.warn)
        stack.enter_context(store.locked())
    checkpointer = Checkpointer(
        store,
        policy,
        run.config.checkpointing,
        partial(_describe, run, run_folder, loggers),
        run.console.warn,
        run.console.message,
        loggers.flush_to_disk,
        partial(write_model_files, policy.model_files),
    )
    stack.callback(checkpointer.close)
    return checkpointer


def _all_samples(error: TrainingDivergedError, run_folder: Path) -> str:
    """Writes the samples of the step to a file, and says where."""
    path = run_folder / DIVERGED_SAMPLES_FILE
    try:
        path.write_text(json.dumps({"sample_ids": error.sample_ids}, indent=1) + "\n", encoding="utf-8")
    except OSError:
        return ""
    return f"\nAll samples of the step: {path}"


def _describe(run: Run, run_folder: Path, loggers: FanOutLogger) -> RunDescription:
    return RunDescription(
        algorithm=run.algorithm,
        run_id=run.attempt.run_id,
        first_run_id=run.first_run_id,
        run_folder=run_folder,
        logger_run_ids=loggers.run_ids,
        config=dump_resolved(run.config),
        layout=layout_of(run.config),
        fingerprints=run.fingerprints,
        versions=collect_versions(),
    )


def end_run(run: Run, policy: MegatronPolicy, summary: RunSummary, run_folder: Path) -> str:
    """Writes the final weights of a run that is complete.

    Returns:
        What to tell at the very end: what was learned and where to look, or how to go on.
    """
    checkpoint_dir = run.checkpoint_dir(run_folder) if run.config.checkpointing.enabled else None
    if summary.stopped_for is not None:
        return _stopped(run, summary, checkpoint_dir)
    weights = None
    if checkpoint_dir is not None:
        weights = checkpoint_dir / FINAL_WEIGHTS_FOLDER
        with run.console.phase("saving the final weights"):
            left_out = policy.save_weights(weights)
            origin = json.dumps(run.origin_of_weights(summary.num_steps))
            (weights / FINAL_RUN_FILE).write_text(f"{origin}\n", encoding="utf-8")
        for name in left_out:
            run.console.warn(left_out_line(name))
    return summarise(run.config, summary, run_folder, weights)


def _stopped(run: Run, summary: RunSummary, checkpoint_dir: Path | None) -> str:
    stopped = f"\nstopped after step {summary.num_steps} of {run.num_steps} ({summary.stopped_for})"
    if checkpoint_dir is None:
        return f"{stopped}; nothing was saved (checkpointing.enabled: false)"
    settings = run.config.checkpointing
    how = "run the same command again" if settings.resume == "auto" else "run it again with checkpointing.resume=auto"
    return f"{stopped}; saved to {checkpoint_dir / f'step_{summary.num_steps}'}. To go on, {how}."

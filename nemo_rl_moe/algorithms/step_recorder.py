# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""End of a training step, for all training loops: metrics are recorded, checkpoints begin, the run may stop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.step_metrics import performance_metrics
from nemo_rl_moe.checkpoints.checkpointer import Checkpointer
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema_base import SupervisedLoopConfig
from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.errors import CheckpointError, TrainingDivergedError
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.runs.folder.artifacts import StepArtifacts
from nemo_rl_moe.runs.loggers.interface import MetricLogger


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run.

    Attributes:
        num_steps: Number of completed steps.
        first_validation: Metrics of the first validation, if there was one.
        stopped_for: Reason why the run ended before its last step. None if it is complete.
    """

    num_steps: int
    first_validation: Mapping[str, float]
    last_validation: Mapping[str, float]
    last_training: Mapping[str, float]
    stopped_for: str | None

    @classmethod
    def of(cls, state: LoopState, stopped_for: str | None) -> "RunSummary":
        """Return the summary of a run from its state."""
        return cls(state.step, state.first_validation, state.last_validation, state.last_training, stopped_for)


def num_training_steps(config: SupervisedLoopConfig | GRPOConfig, steps_per_epoch: int) -> int:
    """Return the number of steps of the run: the steps of all epochs, but at most `max_num_steps`."""
    steps = config.max_num_epochs * steps_per_epoch
    return steps if config.max_num_steps is None else min(steps, config.max_num_steps)


def validation_is_due(config: SupervisedLoopConfig | GRPOConfig, step: int, num_steps: int) -> bool:
    """Return True if a validation follows this step (counted from 1)."""
    periodic = config.val_period > 0 and step % config.val_period == 0
    return periodic or (config.val_at_end and step == num_steps)


_SHOWN_SAMPLES = 8
WriteMore = Callable[[Path], None]


def nothing_more(folder: Path) -> None:
    """Write nothing."""


@dataclass(frozen=True)
class RecordSinks:
    """Functions and loggers that receive the records of a run.

    Attributes:
        log_artifact: Receives the step, and name and content of each artifact, before the step's metrics are logged.
        log_samples: Receives the step, `train` or `val`, and the responses, if there are any, after the step's metrics.
        show_samples: Receives the same arguments as `log_samples`, but before the step's metrics, for loggers that show
            the responses and the metrics of a step in one row.
        log_failures: Receives the step, and failures of its responses or validation, before the step's metrics.
        flush: Writes records that wait to be written together with later steps.
    """

    logger: MetricLogger
    log_artifact: Callable[[int, str, Any], None] = lambda step, name, artifact: None
    log_samples: Callable[[int, str, Sequence[Any]], None] = lambda step, split, samples: None
    flush: Callable[[], None] = lambda: None
    log_failures: Callable[[int, FailedResponses], None] = lambda step, failed: None
    show_samples: Callable[[int, str, Sequence[Any]], None] = lambda step, split, samples: None


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one step.

    Attributes:
        batches_taken: Number of batches, or of rounds of prompts, that have been taken from the data so far.
        training: Metrics of the training step, `train/...`.
        validation: Metrics of the following validation, `val/...` and timing. Empty if none was due.
        write_more: Function that writes the other parts of the state into a checkpoint's folder. It may be called
            later.
    """

    batches_taken: int
    result: TrainResult
    training: Mapping[str, float]
    validation: Mapping[str, float]
    sample_ids: Sequence[str]
    samples: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    failures: Sequence[FailedResponses] = ()
    write_more: WriteMore = nothing_more


class StepRecorder:
    """Recorder of a run's steps. It writes metrics and checkpoints, and decides whether the run continues.

    A step is recorded before its checkpoint is published, so a resumed run finds the records of all its steps.

    Args:
        checkpoints: Writes the checkpoints. None saves no checkpoint.
        stop_reason: Function that returns the reason to end the run after the current step, or None.
        max_skipped_in_a_row: Number of successive skipped updates that ends the run.
        start: State at the beginning of the run, or from the checkpoint with which it resumes.
    """

    def __init__(
        self,
        sinks: RecordSinks,
        checkpoints: Checkpointer | None,
        stop_reason: Callable[[], str | None],
        max_skipped_in_a_row: int,
        start: LoopState,
    ):
        self._sinks = sinks
        self._checkpoints = checkpoints
        self._stop_reason = stop_reason
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._first_step = self._step_of_artifacts = start.step
        self._last_metrics: Mapping[str, float] = {}
        self._write_more: WriteMore = nothing_more
        self.state = start
        self.stopped_for: str | None = None

    @property
    def is_fresh(self) -> bool:
        return self.state.step == 0

    def record_start(
        self,
        validation: Mapping[str, float],
        samples: Mapping[str, Sequence[Any]] | None = None,
        failures: Sequence[FailedResponses] = (),
    ) -> None:
        """Record a validation before the first step."""
        self.state = _with_validation(self.state, validation)
        self._record(0, validation, samples or {}, failures)

    def record_artifacts(self, artifacts: StepArtifacts) -> None:
        """Record the artifacts of the current step before its other records.

        Artifacts come first because an anomaly in them may end the run and must be recorded by then.

        `end_step` calls this method if the loop has not called it.
        """
        step = self.state.step + 1
        if self._step_of_artifacts == step:
            return
        self._step_of_artifacts = step
        for name, artifact in artifacts.items():
            self.record_artifact(name, artifact)

    def record_artifact(self, name: str, artifact: Any) -> None:
        """Record an artifact that an observer of the loop has made in the current step."""
        self._sinks.log_artifact(self.state.step + 1, name, artifact)

    def end_step(self, outcome: StepOutcome, clock: PhaseClock, *, is_last: bool) -> bool:
        """Record the step, begin a checkpoint if one is due, and return whether the run continues.

        Args:
            clock: Clock with the phase `step`, and inside it `train`. The phase `checkpoint` is timed on it.
            is_last: Whether the run is complete with this step.
        """
        self.record_artifacts(outcome.result.artifacts)
        self.state = state = self._next_state(outcome)
        self._write_more = outcome.write_more
        self.stopped_for = None if is_last else self._stop_reason()
        metrics = self._last_metrics = {**outcome.training, **outcome.validation}
        saves = False
        if self._checkpoints is not None:
            self._checkpoints.poll()
            if saves := self._saves(is_last=is_last):
                with clock.phase("checkpoint"):
                    self._checkpoints.start(state, metrics, outcome.write_more)
        metrics |= clock.metrics() | performance_metrics(outcome.result, clock)
        self._record(state.step, metrics, outcome.samples, outcome.failures)
        if saves:
            self._sinks.flush()
        if self._has_diverged:
            raise TrainingDivergedError(self._diverged(outcome), sorted(set(outcome.sample_ids)))
        return not is_last and self.stopped_for is None

    def give_up_step(self) -> None:
        """End the run at the last recorded step, because the current step was given up before it changed the weights.

        A checkpoint of the last recorded step begins, unless this run has recorded none yet.
        """
        self.stopped_for = self._stop_reason()
        if self._checkpoints is not None and self.state.step > self._first_step:
            self._checkpoints.start(self.state, self._last_metrics, self._write_more)
            self._sinks.flush()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    @property
    def _has_diverged(self) -> bool:
        return self.state.skipped_in_a_row >= self._max_skipped_in_a_row

    def _saves(self, *, is_last: bool) -> bool:
        assert self._checkpoints is not None
        if self._has_diverged:
            return False
        # While updates are skipped, no checkpoint replaces the last one before them.
        is_due = self._checkpoints.is_due(self.state.step) and self.state.skipped_in_a_row == 0
        return is_due or is_last or self.stopped_for is not None

    def _next_state(self, outcome: StepOutcome) -> LoopState:
        result, before = outcome.result, self.state
        all_skipped = result.num_updates > 0 and result.skipped_in_a_row == result.num_updates
        state = replace(
            before,
            step=before.step + 1,
            batches_taken=outcome.batches_taken,
            last_training=dict(outcome.training),
            skipped_in_a_row=result.skipped_in_a_row + (before.skipped_in_a_row if all_skipped else 0),
        )
        return _with_validation(state, outcome.validation)

    def _record(
        self,
        step: int,
        metrics: Mapping[str, float],
        samples: Mapping[str, Sequence[Any]],
        failures: Sequence[FailedResponses],
    ) -> None:
        for failed in failures:
            self._sinks.log_failures(step, failed)
        for split, responses in samples.items():
            self._sinks.show_samples(step, split, responses)
        self._sinks.logger.log_step(step, metrics)
        for split, responses in samples.items():
            self._sinks.log_samples(step, split, responses)

    def _diverged(self, outcome: StepOutcome) -> str:
        samples = sorted(set(outcome.sample_ids))
        shown = ", ".join(samples[:_SHOWN_SAMPLES])
        more = f" and {len(samples) - _SHOWN_SAMPLES} more" if len(samples) > _SHOWN_SAMPLES else ""
        checkpoint, unsaved = None, ""
        if self._checkpoints is not None:
            try:
                self._checkpoints.finish()
            except CheckpointError as error:
                unsaved = f"\n{error}"
            checkpoint = self._checkpoints.last_published
        return (
            f"step {self.state.step}: {self.state.skipped_in_a_row} updates in a row were skipped, as their loss or "
            f"gradient was NaN or infinite (policy.max_consecutive_skipped_updates: {self._max_skipped_in_a_row}).\n"
            f"The step's samples: {shown}{more}.\n"
            f"The last good checkpoint: {checkpoint or 'none was saved'}.{unsaved}"
        )


def _with_validation(state: LoopState, validation: Mapping[str, float]) -> LoopState:
    measured = {name: value for name, value in validation.items() if name.startswith("val/")}
    if not measured:
        return state
    return replace(state, first_validation=state.first_validation or measured, last_validation=measured)

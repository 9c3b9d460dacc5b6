# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One logger for all loggers of a run. A logger that fails does not stop training."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self

from nemo_rl_moe.config.user_code import described
from nemo_rl_moe.errors import UserCodeError
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.folder.sample_text import ShownSample
from nemo_rl_moe.runs.folder.samples import SavedTrajectory
from nemo_rl_moe.runs.loggers.alerts import Alert, AlertWatch
from nemo_rl_moe.runs.loggers.artifacts import ARTIFACTS
from nemo_rl_moe.runs.loggers.console import Notices, reason_of
from nemo_rl_moe.runs.loggers.interface import FlushesToDisk, MetricLogger
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.runs.loggers.step_plots import StepPlots

ChooseSamples = Callable[[int, str, Sequence[SavedTrajectory]], Sequence[ShownSample]]


class FanOutLogger:
    """All loggers of a run. NaN and infinities are logged unchanged.

    A logger that raises an error, for example because of a closed terminal, is dropped with a warning. A metric that is
    not a number raises an error about the code that returned it.
    """

    name = "all loggers"

    def __init__(
        self,
        direct: Sequence[MetricLogger],
        notices: Notices,
        isolated: Sequence[IsolatedLogger] = (),
        *,
        earlier_run_ids: Mapping[str, str] = MappingProxyType({}),
        closing_s: float = Patience.closing_s,
        plots: StepPlots | None = None,
        alerts: AlertWatch | None = None,
    ):
        self._notices = notices
        self._closing_s = closing_s
        self._direct = list(direct)
        self._isolated = list(isolated)
        self._earlier_run_ids = dict(earlier_run_ids)
        self._plots, self._alerts = plots, alerts
        self._failed: list[FailedResponses] = []

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the loggers that have not failed."""
        isolated = [logger for logger in self._isolated if logger.is_active]
        return tuple(logger.name for logger in (*self._direct, *isolated))

    @property
    def run_ids(self) -> dict[str, str]:
        """Logger -> id of the run at its service, as far as it is known, for a checkpoint."""
        return self._earlier_run_ids | {logger.name: logger.run_id for logger in self._isolated if logger.run_id}

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step to all loggers. The direct loggers have it when this method returns."""
        numbers = self._numbers(step, metrics)
        self._for_each(f"failed at step {step}", lambda logger: logger.log_step(step, numbers))
        for isolated in self._isolated:
            isolated.log_step(step, numbers)
        failed, self._failed = self._failed, []
        if self._alerts is not None:
            self._report(self._alerts.observe(step, numbers, failed=failed))

    def log_artifact(self, step: int, name: str, artifact: Any) -> None:
        """Log an artifact of a step. It is called before `log_step`, since plots belong to the step's row.

        Alerts are sent immediately, since anomalies may end the run.
        """
        kind = ARTIFACTS[name]
        plot, title = partial(kind.plot, step, artifact), name.replace("_", " ")
        draw = None if self._plots is None else self._plots.of_step(step, title, plot)
        if draw is not None:
            for isolated in self._isolated:
                isolated.log_plots(step, draw)
        if self._alerts is not None:
            self._report(kind.alerts(self._alerts, step, artifact))

    def log_samples(self, shown: ChooseSamples, step: int, split: str, trajectories: Sequence[SavedTrajectory]) -> None:
        """Log the conversations of a validation, or of a training step with plots. It is called before `log_step`."""
        is_due = split == "val" or (self._plots is not None and self._plots.are_due(step))
        if not self._isolated or not is_due:
            return
        if conversations := [sample for sample in shown(step, split, trajectories) if sample.turns]:
            for isolated in self._isolated:
                isolated.log_samples(step, split, conversations)

    def log_failures(self, failed: FailedResponses) -> None:
        """Keep failures of a step or its validation for the alerts of the next `log_step`."""
        self._failed.append(failed)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._for_each("failed to store the configuration", lambda logger: logger.log_config(config))
        for isolated in self._isolated:
            isolated.log_config(config)

    def flush_to_disk(self) -> bool:
        """Wait until every logged step is on the disk. Return False on failure. Any thread may call it."""
        files = [logger for logger in list(self._direct) if isinstance(logger, FlushesToDisk)]
        return all(logger.flush_to_disk() for logger in files)

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Close every logger, in bounded time. A second call does nothing."""
        isolated, self._isolated = self._isolated, []
        self._earlier_run_ids |= {logger.name: logger.run_id for logger in isolated if logger.run_id}
        for logger in isolated:
            logger.ask_to_close(outcome)
        try:
            deadline = time.monotonic() + self._closing_s
            for logger in isolated:
                logger.wait_until_closed(deadline)
        finally:
            # Loggers must not keep the process alive, even after an interrupt.
            for logger in isolated:
                logger.let_go()
            self._for_each("failed to close", lambda direct: direct.close(outcome))
            self._direct.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if error is None else "failed" if isinstance(error, Exception) else "killed")

    def _report(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self._notices.warn(alert.line)
            for isolated in self._isolated:
                isolated.send_alert(alert.title, alert.text)

    def _numbers(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a copy of the metrics as plain floats, for the threads of the isolated loggers."""
        numbers: dict[str, float] = {}
        for key, value in metrics.items():
            try:
                numbers[key] = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UserCodeError(
                    f"the metric {key} of step {step} is {described(value)}, expected a number"
                ) from error
        return numbers

    def _for_each(self, failure: str, action: Callable[[MetricLogger], None]) -> None:
        for logger in list(self._direct):
            try:
                action(logger)
            except Exception as error:
                self._direct.remove(logger)
                self._notices.warn(f"logger {logger.name} {failure} and is not used from here on: {reason_of(error)}")
                # To free its files. A second failure after the warning is of no interest.
                with contextlib.suppress(Exception):
                    logger.close()

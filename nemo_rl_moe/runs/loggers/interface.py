# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Interfaces of all loggers, and of backends that run in separate threads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.folder.sample_text import ShownSample

DrawPlots = Callable[[], Mapping[str, bytes]]
"""Function that returns the plots of a step: key, such as `plots/expert_load`, -> PNG file. It takes seconds."""


class StepSink(Protocol):
    """Receiver of the metrics of a run."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step. It is called once per step, in ascending order.

        Args:
            step: Number of steps taken so far. 0 for a validation before the first step.
            metrics: Full key -> value. Keys are, for example, `train/loss`, `val/accuracy`,
                `timing/train/step_seconds`. A value may be NaN or infinite.
        """
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the resolved, nested configuration. It is called once, before the first step."""
        ...

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Flush buffers and close files and connections.

        Args:
            outcome: `finished` (also if stopped and saved), `failed` by an error, or `killed` by a signal.
        """
        ...


class MetricLogger(StepSink, Protocol):
    """Logger of metrics, as the training loop sees it."""

    name: str


@runtime_checkable
class FlushesToDisk(Protocol):
    """Logger whose steps must be on the disk before a checkpoint of these steps is written."""

    def flush_to_disk(self) -> bool:
        """Wait until all steps are on the disk. Return False on failure. Any thread may call it."""
        ...


class Backend(StepSink, Protocol):
    """Logger that may raise or block, and therefore runs in the thread of an `IsolatedLogger`."""

    @property
    def run_id(self) -> str | None:
        """Id of the run at the service, if there is one."""
        ...

    @property
    def last_step(self) -> int:
        """Last step before the resume that the backend has, or -1."""
        ...

    @property
    def announcement(self) -> str | None:
        """Line for the user with the address of the run, if the run has an address."""
        ...

    @property
    def seconds_to_close(self) -> float:
        """Number of seconds that `close` may take in a healthy backend. 0 if it is fast."""
        ...

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        """Log the plots of a step. It is called before the step's `log_step`."""
        ...


class LoggerBase:
    """Base of a backend without a service. A subclass defines `log_step`, and overrides other members if needed."""

    run_id: str | None = None
    last_step: int = -1
    announcement: str | None = None
    seconds_to_close: float = 0.0

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Do nothing, since the run's folder has the configuration."""

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        """Do nothing."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Do nothing."""


@runtime_checkable
class ShowsSamples(Protocol):
    """Backend that shows conversations of a step."""

    def log_samples(self, step: int, split: str, samples: Sequence[ShownSample]) -> None:
        """Log samples with conversations. It is called before `log_step`. Texts may contain control characters."""
        ...


@runtime_checkable
class SendsAlerts(Protocol):
    """Backend that notifies the user outside of the console."""

    def send_alert(self, title: str, text: str) -> None:
        """Send plain text. The service may drop further alerts with the same title within a minute."""
        ...

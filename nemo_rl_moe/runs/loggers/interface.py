# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Interfaces of the loggers: of all of them, and of backends that run in a thread of their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.folder.sample_text import ShownSample

DrawPlots = Callable[[], Mapping[str, bytes]]
"""Function that draws the plots of a step: key, such as `plots/expert_load`, to PNG file. Takes seconds."""


class StepSink(Protocol):
    """Receiver of the metrics of a run."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step; called once a step, steps ascending.

        Args:
            step: Optimizer steps taken so far; 0 for a validation before the first one.
            metrics: Complete key to value, for example `train/loss`, `val/accuracy`, `timing/train/step_seconds`.
                A value may be NaN or infinite.
        """
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the resolved, nested configuration; called once, before the first step."""
        ...

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Write what is still buffered and close files and connections.

        Args:
            outcome: `finished` (also: stopped and saved), `failed` by an error, or `killed` by a signal.
        """
        ...


class MetricLogger(StepSink, Protocol):
    """Logger of metrics; all that the training loop knows of loggers."""

    name: str


@runtime_checkable
class FlushesToDisk(Protocol):
    """Logger whose steps have to be on the disk before a checkpoint of them is."""

    def flush_to_disk(self) -> bool:
        """Wait until the disk has all steps; False where some cannot be written. May be called from any thread."""
        ...


class Backend(StepSink, Protocol):
    """Logger that may raise or block, and therefore runs behind an `IsolatedLogger`, in a thread of its own."""

    @property
    def run_id(self) -> str | None:
        """Id of the run at the service; None where there is no service."""
        ...

    @property
    def last_step(self) -> int:
        """Last step that the backend has from before the run was resumed; -1: none."""
        ...

    @property
    def announcement(self) -> str | None:
        """Return one line that says where the run can be seen; None: no line."""
        ...

    @property
    def seconds_to_close(self) -> float:
        """Seconds that `close` may take in a healthy backend; 0: no time worth mentioning."""
        ...

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        """Log the plots of a step, before the step's metrics."""
        ...


class LoggerBase:
    """Base of a backend without a service: a subclass adds `log_step`, and overrides what is otherwise."""

    run_id: str | None = None
    last_step: int = -1
    announcement: str | None = None
    seconds_to_close: float = 0.0

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Do nothing: the run's folder has the configuration."""

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        """Do nothing."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Do nothing."""


@runtime_checkable
class ShowsSamples(Protocol):
    """Backend that shows conversations of a step."""

    def log_samples(self, step: int, split: str, samples: Sequence[ShownSample]) -> None:
        """Log samples with their conversations, before the step's metrics. Texts may hold anything."""
        ...


@runtime_checkable
class SendsAlerts(Protocol):
    """Backend that reaches the user outside of the console."""

    def send_alert(self, title: str, text: str) -> None:
        """Send plain text; of one title, the service may hold back all but one within a minute."""
        ...

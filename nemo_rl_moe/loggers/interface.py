# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What every logger can do; the training loop knows nothing else about them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from nemo_rl_moe.run_folder.metrics import RunOutcome

DrawPictures = Callable[[], Mapping[str, bytes]]
"""Draws the pictures of a step: key, such as `pictures/expert_load`, to PNG file. The first time takes seconds."""


class MetricLogger(Protocol):
    """One place that metrics are sent to.

    Attributes:
        name: What warnings call this logger, for example `tensorboard`.
    """

    name: str

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes everything that is known about one step; called once a step, steps ascending.

        Args:
            step: Optimizer steps taken so far; 0 stands for what was measured before the first one.
            metrics: Complete key to value, for example `train/loss`, `val/accuracy`, `timing/train/step_seconds`.
                A value may be NaN or infinite.
        """
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Takes the resolved, nested configuration; called once, before the first step."""
        ...

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Writes what is still held back and lets go of files and connections.

        Args:
            outcome: How the run ended: by itself or stopped and saved, by an error, or by a signal that ended it.
        """
        ...


@runtime_checkable
class FlushesToDisk(Protocol):
    """A logger whose steps have to be on the disk before a checkpoint of them is."""

    def flush_to_disk(self) -> bool:
        """Waits until the disk has all steps; False where some cannot be written. May be called from any thread."""
        ...


class Backend(MetricLogger, Protocol):
    """A logger that may raise or block, and therefore runs behind an `IsolatedLogger`, in a thread of its own.

    After a step that raised, parts of the same step may be sent again.
    """

    @property
    def run_id(self) -> str | None:
        """By what the service finds this run again; None where there is no service."""
        ...

    @property
    def last_step(self) -> int:
        """The last step that an earlier attempt of the run has left here; -1: none."""
        ...

    @property
    def announcement(self) -> str | None:
        """One line for the user that says where the run can be seen; None: nothing to say."""
        ...

    @property
    def seconds_to_close(self) -> float:
        """How long `close` may take when all is well; 0: not worth telling."""
        ...

    def log_pictures(self, step: int, pictures: Mapping[str, bytes]) -> None:
        """Takes the pictures of a step, before the step's metrics.

        Args:
            step: Their step; there are none for most steps.
            pictures: Key, such as `pictures/expert_load`, to PNG file.
        """
        ...


@runtime_checkable
class SendsAlerts(Protocol):
    """A backend that reaches the user outside of the console."""

    def send_alert(self, title: str, text: str) -> None:
        """Sends plain text; of one title, the service may hold back all but one within a minute."""
        ...

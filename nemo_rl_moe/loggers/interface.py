# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What every logger can do; the training loop knows nothing else about them."""

from collections.abc import Mapping
from typing import Any, Protocol


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

    def close(self) -> None:
        """Writes what is still held back and lets go of files and connections."""
        ...

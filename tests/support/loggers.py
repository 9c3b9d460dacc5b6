# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What several tests of the loggers use."""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.config.schema_run import LoggerConfig
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.loggers.interface import MetricLogger


def settings_for(
    log_dir: Path,
    *enabled: str,
    tracking_uri: str | None = None,
    plots_every: int | None = None,
    alerts: bool = False,
    backends: Sequence[str] = (),
) -> LoggerConfig:
    """Return the `logger` section with some backends enabled; alerts after three steps."""
    return LoggerConfig.model_validate(
        {
            "log_dir": str(log_dir),
            "console": {"live": "auto"},
            **{f"{name}_enabled": name in enabled for name in ("tensorboard", "wandb", "mlflow")},
            "backends": list(backends),
            "expert_load_plots": {"every_steps": plots_every},
            "alerts": {
                "enabled": alerts,
                "dead_expert_steps": 3,
                "excess_cv": 1.0,
                "overload_factor": 1.5,
                "sustained_steps": 3,
                "idle_steps": 3,
                "failed_responses_share": 0.01,
                "missing_routes_share": 0.001,
                "missing_routes_steps": 3,
                "sudden_steps": None,
                "unbounded_lag": None,
            },
            "wandb": {"project": "p", "name": "n"},
            "mlflow": {"experiment_name": "e", "run_name": "n", "tracking_uri": tracking_uri},
        }
    )


class ListBackend:
    """Keeps what it is given, in order; waits at `gate`, and fails where it is reported to.

    Args:
        gate: Each step waits for it.
        fails_from: The first step that it does not take.
        bad_keys: Keys, a letter each, with which it takes no step.
        no_plots_at: Steps whose plots it does not take.
    """

    name = "x"
    announcement = None

    def __init__(
        self,
        gate: threading.Event | None = None,
        fails_from: int = 99,
        bad_keys: str = "",
        no_plots_at: Collection[int] = (),
    ):
        self.run_id, self.last_step, self.seconds_to_close = "id-1", -1, 0.0
        self.calls: list[tuple[str, int]] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.plots: dict[int, Mapping[str, bytes]] = {}
        self.asked_for_plots_at: list[int] = []
        self.config: Mapping[str, Any] = {}
        self.outcome = ""
        self.thread: threading.Thread | None = None
        self._gate, self._fails_from, self._bad_keys = gate, fails_from, set(bad_keys)
        self._no_plots_at = no_plots_at

    def open(self) -> "ListBackend":
        """Open as a backend does, in the thread that all its calls have to come from."""
        self.thread = threading.current_thread()
        return self

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert threading.current_thread() is self.thread
        if self._gate is not None:
            self._gate.wait()
        if step >= self._fails_from:
            raise OSError("disk is full")
        if bad := self._bad_keys & metrics.keys():
            raise ValueError(f"invalid key {sorted(bad)}")
        self.calls.append(("step", step))
        self.steps.append((step, dict(metrics)))

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        self.asked_for_plots_at.append(step)
        if step in self._no_plots_at:
            raise OSError("no space")
        self.calls.append(("plots", step))
        self.plots[step] = {**self.plots.get(step, {}), **plots}

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def close(self, outcome: str = "finished") -> None:
        self.outcome = outcome


def load_of(*rows: Sequence[int]) -> ExpertLoad:
    """Return the load of layers 1, 2, ..., each a row of counts."""
    return ExpertLoad(tuple(range(1, len(rows) + 1)), torch.tensor(rows))


def log_steps(logger: MetricLogger, steps: Iterable[int], pause: float = 0.0) -> None:
    """Log a loss for each step."""
    for step in steps:
        logger.log_step(step, {"train/loss": float(step)})
        time.sleep(pause)

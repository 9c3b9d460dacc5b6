# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What several tests of the loggers use."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from nemo_rl_moe.config.schema_run import LoggerConfig
from nemo_rl_moe.loggers.interface import MetricLogger
from nemo_rl_moe.moe.load_statistics import ExpertLoad


def settings_for(
    log_dir: Path,
    *enabled: str,
    tracking_uri: str | None = None,
    pictures_every: int | None = None,
    alerts: bool = False,
) -> LoggerConfig:
    """The `logger` section with some backends enabled; alerts after three steps."""
    return LoggerConfig.model_validate(
        {
            "log_dir": str(log_dir),
            "console": {"live": "auto"},
            **{f"{name}_enabled": name in enabled for name in ("tensorboard", "wandb", "mlflow")},
            "expert_load_pictures": {"every_steps": pictures_every},
            "alerts": {
                "enabled": alerts,
                "dead_expert_steps": 3,
                "excess_cv": 1.0,
                "overload_factor": 1.5,
                "sustained_steps": 3,
            },
            "wandb": {"project": "p", "name": "n"},
            "mlflow": {"experiment_name": "e", "run_name": "n", "tracking_uri": tracking_uri},
        }
    )


def load_of(*rows: Sequence[int]) -> ExpertLoad:
    """The load of layers 1, 2, ..., each a row of counts."""
    return ExpertLoad(tuple(range(1, len(rows) + 1)), torch.tensor(rows))


def log_steps(logger: MetricLogger, steps: Iterable[int], pause: float = 0.0) -> float:
    """Logs a loss for each step, and returns the seconds that the longest call took."""
    longest = 0.0
    for step in steps:
        started = time.perf_counter()
        logger.log_step(step, {"train/loss": float(step)})
        longest = max(longest, time.perf_counter() - started)
        time.sleep(pause)
    return longest

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""From the configuration's `logger` section to the loggers of a run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.loggers.fan_out import FanOutLogger
from nemo_rl_moe.loggers.interface import MetricLogger
from nemo_rl_moe.loggers.jsonl import JsonlLogger
from nemo_rl_moe.loggers.mlflow import MlflowLogger, local_store_uri
from nemo_rl_moe.loggers.tensorboard import TensorBoardLogger
from nemo_rl_moe.loggers.wandb import WandbLogger


class WandbSettings(Protocol):
    """`logger.wandb`: the project, and the run's name (None: W&B's choice)."""

    @property
    def project(self) -> str: ...
    @property
    def name(self) -> str | None: ...


class MlflowSettings(Protocol):
    """`logger.mlflow`: the experiment, the run's name (None: MLflow's choice), the store (None: a local one)."""

    @property
    def experiment_name(self) -> str: ...
    @property
    def run_name(self) -> str | None: ...
    @property
    def tracking_uri(self) -> str | None: ...


class LoggerSettings(Protocol):
    """What the loggers need of the configuration's `logger` section."""

    @property
    def log_dir(self) -> str | Path: ...
    @property
    def tensorboard_enabled(self) -> bool: ...
    @property
    def wandb_enabled(self) -> bool: ...
    @property
    def mlflow_enabled(self) -> bool: ...
    @property
    def wandb(self) -> WandbSettings: ...
    @property
    def mlflow(self) -> MlflowSettings: ...


def build_loggers(logger_config: LoggerSettings, run_folder: Path, console: ConsoleLogger) -> FanOutLogger:
    """Opens the loggers that the configuration asks for; the console and `metrics.jsonl` always take part.

    Args:
        logger_config: The `logger` section.
        run_folder: The run's folder, as `create_run_folder` makes it.
        console: Shows the steps, and the warnings about loggers that fail; closed with the others.
    """
    backends: dict[str, Callable[[], MetricLogger]] = {
        ConsoleLogger.name: lambda: console,
        JsonlLogger.name: partial(JsonlLogger, run_folder),
    }
    if logger_config.tensorboard_enabled:
        backends[TensorBoardLogger.name] = partial(TensorBoardLogger, run_folder)
    if logger_config.wandb_enabled:
        wandb = logger_config.wandb
        backends[WandbLogger.name] = partial(WandbLogger, run_folder, wandb.project, wandb.name, console.message)
    if logger_config.mlflow_enabled:
        backends[MlflowLogger.name] = partial(_open_mlflow, logger_config)
    return FanOutLogger(backends, console.warn)


def mlflow_tracking_uri(logger_config: LoggerSettings) -> str:
    """Where the MLflow runs go: `logger.mlflow.tracking_uri`, or `mlflow.db` beside the log folder.

    Beside it and not inside, so that runs with different log folders stand side by side in one store.
    """
    return logger_config.mlflow.tracking_uri or local_store_uri(Path(logger_config.log_dir).resolve().parent)


def _open_mlflow(logger_config: LoggerSettings) -> MlflowLogger:
    settings = logger_config.mlflow
    return MlflowLogger(mlflow_tracking_uri(logger_config), settings.experiment_name, settings.run_name)

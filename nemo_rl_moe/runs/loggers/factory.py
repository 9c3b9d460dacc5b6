# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Loggers of a run from the `logger` section of its configuration."""

import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_rl_moe.config.schema_run import AlertsConfig, LoggerConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.config.user_code import import_function
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.runs.folder.folder import read_logger_run_ids, store_logger_run_ids
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, JsonlLogger, StepRecord, read_metrics
from nemo_rl_moe.runs.loggers.alerts import AlertWatch
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from nemo_rl_moe.runs.loggers.interface import Backend, LoggerBase, StepSink
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.runs.loggers.mlflow import MlflowLogger, local_store_uri
from nemo_rl_moe.runs.loggers.step_plots import StepPlots
from nemo_rl_moe.runs.loggers.tensorboard import TensorBoardLogger
from nemo_rl_moe.runs.loggers.wandb import WandbLogger, abandon_service, choose_run_id


@dataclass(frozen=True)
class LoggerResume:
    """State of the loggers in the checkpoint from which a run resumes."""

    step: int
    run_ids: Mapping[str, str]


def build_loggers(
    logger_config: LoggerConfig,
    run_folder: Path,
    console: ConsoleLogger,
    resume: LoggerResume | None = None,
    patience: Patience | None = None,
    topk: int | None = None,
) -> FanOutLogger:
    """Return the opened loggers: those of the configuration, the console and `metrics.jsonl`.

    In a resumed run, steps that TensorBoard or a service lacks are sent again from `metrics.jsonl`, because they may
    have waited in a queue when the run was killed.
    """
    notices = Notices(console.message, console.warn)
    run_ids = {**resume.run_ids, **read_logger_run_ids(run_folder)} if resume else {}
    patience = patience or Patience()
    isolated: list[IsolatedLogger] = []
    earlier = partial(_steps_until, run_folder / METRICS_FILE_NAME, resume.step) if resume else tuple

    def isolate(name: str, open_backend: Callable[[], Backend], abandon: Callable[[], None] | None = None) -> None:
        isolated.append(
            IsolatedLogger(
                name,
                open_backend,
                notices,
                earlier_steps=earlier,
                abandon=abandon,
                run_id=run_ids.get(name),
                patience=patience,
            )
        )
        try:
            # Loggers open one after the other, since packages may fail if several threads import them at once.
            isolated[-1].wait_until_open()
        except BaseException:
            # After an interrupt, threads must not keep the process alive.
            for logger in isolated:
                logger.let_go()
            raise

    if logger_config.tensorboard_enabled:
        isolate(TensorBoardLogger.name, partial(TensorBoardLogger, run_folder, resume.step if resume else None))
    if logger_config.wandb_enabled:
        is_resumed = WandbLogger.name in run_ids
        open_wandb = partial(
            WandbLogger,
            run_folder,
            logger_config.wandb.project,
            logger_config.wandb.name,
            run_ids.setdefault(WandbLogger.name, choose_run_id(os.environ)),
            is_resumed=is_resumed,
            earlier_steps=earlier,
            outlier_chart_every_steps=logger_config.expert_load_plots.every_steps,
        )
        isolate(WandbLogger.name, open_wandb, abandon_service)
    if logger_config.mlflow_enabled:
        isolate(MlflowLogger.name, partial(_open_mlflow, logger_config, run_ids.get(MlflowLogger.name)))
    for name, make in find_custom_backends(logger_config).items():
        isolate(name, partial(make, run_folder))
    loggers = FanOutLogger(
        [JsonlLogger(run_folder, notices.warn, notices.message), console],
        notices,
        isolated,
        earlier_run_ids=run_ids,
        closing_s=patience.closing_s,
        plots=StepPlots(logger_config.expert_load_plots.every_steps, notices),
        alerts=_alert_watch(logger_config.alerts, topk, run_folder, resume),
    )
    if loggers.run_ids:
        # Only a run that is killed before its first checkpoint needs them, so a full disk may be ignored.
        with suppress(OSError):
            store_logger_run_ids(run_folder, loggers.run_ids)
    return loggers


def find_custom_backends(logger_config: LoggerConfig) -> dict[str, Callable[[Path], Backend]]:
    """Return name -> function that opens the logger, for the user's loggers in `logger.backends`."""
    if twice := [name for name, count in Counter(logger_config.backends).items() if count > 1]:
        raise ConfigurationError(f"{_KEY}: got {twice[0]} twice, expected each logger once")
    return {name: _import_backend(name) for name in logger_config.backends}


_KEY = "logger.backends"
_METHODS = [
    name for of in (StepSink, Backend) for name, part in vars(of).items() if inspect.isfunction(part) and name[0] != "_"
]


def _import_backend(name: str) -> Callable[[Path], Backend]:
    make = import_function(_KEY, name, "the run's folder")
    # The result of a function is not known yet.
    parts = dir(make) if inspect.isclass(make) else _METHODS
    if missing := [method for method in _METHODS if method not in parts]:
        hint = did_you_mean(nearest(missing[0], [part for part in parts if not part.startswith("_")]))
        raise ConfigurationError(
            f"{_KEY}: {name} has no method {missing[0]}, expected {', '.join(_METHODS)} (all but log_step are in"
            f" {LoggerBase.__module__}.{LoggerBase.__name__}){hint}"
        )
    return make


def mlflow_tracking_uri(logger_config: LoggerConfig) -> str:
    """Return the MLflow store: `logger.mlflow.tracking_uri`, or `mlflow.db` next to the log folder.

    The store is not inside the log folder, so that runs with different log folders share it.
    """
    return logger_config.mlflow.tracking_uri or local_store_uri(Path(logger_config.log_dir).resolve().parent)


def _open_mlflow(logger_config: LoggerConfig, resumed_run_id: str | None) -> MlflowLogger:
    mlflow = logger_config.mlflow
    return MlflowLogger(mlflow_tracking_uri(logger_config), mlflow.experiment_name, mlflow.run_name, resumed_run_id)


def _alert_watch(
    settings: AlertsConfig, topk: int | None, run_folder: Path, resume: LoggerResume | None
) -> AlertWatch | None:
    if not settings.enabled:
        return None
    watch = AlertWatch(settings, topk)
    if resume is not None:
        watch.replay(run_folder, resume.step)
    return watch


def _steps_until(path: Path, step: int) -> list[StepRecord]:
    return [record for record in read_metrics(path) if record.step <= step] if path.is_file() else []

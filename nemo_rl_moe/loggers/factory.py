# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""From the configuration's `logger` section to the loggers of a run."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from nemo_rl_moe.loggers.alerts import AlertSettings, AlertWatch
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.loggers.fan_out import FanOutLogger
from nemo_rl_moe.loggers.interface import Backend, MetricLogger
from nemo_rl_moe.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.loggers.load_pictures import LoadPictures
from nemo_rl_moe.loggers.mlflow import MlflowLogger, local_store_uri
from nemo_rl_moe.loggers.notices import Notices, reason_of
from nemo_rl_moe.loggers.tensorboard import TensorBoardLogger
from nemo_rl_moe.loggers.wandb import WandbLogger, abandon_service, choose_run_id
from nemo_rl_moe.run_folder.folder import read_logger_run_ids, store_logger_run_ids
from nemo_rl_moe.run_folder.metrics import METRICS_FILE_NAME, JsonlLogger, StepRecord, read_metrics


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


class PictureSettings(Protocol):
    """`logger.expert_load_pictures`: how often (None or 0: never)."""

    @property
    def every_steps(self) -> int | None: ...


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
    @property
    def expert_load_pictures(self) -> PictureSettings: ...
    @property
    def alerts(self) -> AlertSettings: ...


@dataclass(frozen=True)
class LoggerResume:
    """Where the loggers of a resumed run go on.

    Attributes:
        step: The last step that is kept.
        run_ids: What `FanOutLogger.run_ids` was then; the run's folder may know more.
    """

    step: int
    run_ids: Mapping[str, str]


def build_loggers(
    logger_config: LoggerSettings,
    run_folder: Path,
    console: ConsoleLogger,
    resume: LoggerResume | None = None,
    patience: Patience | None = None,
    topk: int | None = None,
) -> FanOutLogger:
    """Opens the loggers that the configuration asks for; the console and `metrics.jsonl` always take part.

    Steps that a resumed run's services or TensorBoard lack, such as those that waited in a queue when an earlier
    attempt was killed, are sent to them again from `metrics.jsonl`.

    Args:
        logger_config: The `logger` section.
        run_folder: The run's folder, as `create_run_folder` makes it; of a resumed run, after `rewind_run_folder`.
        console: Shows the steps, and the warnings about loggers that fail; closed with the others.
        resume: Where a resumed run goes on; None for one that starts anew.
        patience: How long the loggers other than these two are waited for; None: the usual times.
        topk: Experts that a token goes to; None: a dense model, or not known.
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
            # One after the other: packages that are imported by several threads at once can get in each other's way.
            isolated[-1].wait_until_open()
        except BaseException:
            # Interrupted: nothing may keep the process from ending.
            for logger in isolated:
                logger.let_go()
            raise

    if logger_config.tensorboard_enabled:
        isolate(
            TensorBoardLogger.name,
            partial(TensorBoardLogger, run_folder, resume.step if resume else None),
        )
    if logger_config.wandb_enabled:
        wandb = logger_config.wandb
        is_resumed = WandbLogger.name in run_ids
        run_id = run_ids.setdefault(WandbLogger.name, choose_run_id(os.environ))
        names = wandb.project, wandb.name, run_id
        open_wandb = partial(
            WandbLogger,
            run_folder,
            *names,
            is_resumed=is_resumed,
            earlier_steps=earlier,
            outlier_chart_every_steps=logger_config.expert_load_pictures.every_steps,
        )
        isolate(WandbLogger.name, open_wandb, abandon_service)
    if logger_config.mlflow_enabled:
        isolate(MlflowLogger.name, partial(_open_mlflow, logger_config, run_ids.get(MlflowLogger.name)))
    direct: dict[str, Callable[[], MetricLogger]] = {
        JsonlLogger.name: partial(JsonlLogger, run_folder, notices.warn, notices.message),
        ConsoleLogger.name: lambda: console,
    }
    loggers = FanOutLogger(
        direct,
        notices,
        isolated,
        earlier_run_ids=run_ids,
        closing_s=patience.closing_s,
        pictures=LoadPictures(logger_config.expert_load_pictures.every_steps, notices),
        alerts=_alert_watch(logger_config.alerts, topk, run_folder, resume, notices),
    )
    if loggers.run_ids:
        # Only a run that is killed before its first checkpoint needs them.
        with suppress(OSError):
            store_logger_run_ids(run_folder, loggers.run_ids)
    return loggers


def mlflow_tracking_uri(logger_config: LoggerSettings) -> str:
    """Where the MLflow runs go: `logger.mlflow.tracking_uri`, or `mlflow.db` beside the log folder.

    Beside it and not inside, so that runs with different log folders stand side by side in one store.
    """
    return logger_config.mlflow.tracking_uri or local_store_uri(Path(logger_config.log_dir).resolve().parent)


def _open_mlflow(logger_config: LoggerSettings, resumed_run_id: str | None) -> MlflowLogger:
    settings = logger_config.mlflow
    uri = mlflow_tracking_uri(logger_config)
    return MlflowLogger(uri, settings.experiment_name, settings.run_name, resumed_run_id)


def _alert_watch(
    settings: AlertSettings, topk: int | None, run_folder: Path, resume: LoggerResume | None, notices: Notices
) -> AlertWatch | None:
    if not settings.enabled:
        return None
    watch = AlertWatch(settings, topk)
    if resume is not None:
        try:
            watch.replay(run_folder, resume.step)
        except Exception as error:
            notices.warn(
                f"alerts start anew at step {resume.step + 1}, and may repeat what has been told: looking at the "
                f"steps before it failed: {reason_of(error)}"
            )
            return AlertWatch(settings, topk)
    return watch


def _steps_until(path: Path, step: int) -> list[StepRecord]:
    return [record for record in read_metrics(path) if record.step <= step] if path.is_file() else []

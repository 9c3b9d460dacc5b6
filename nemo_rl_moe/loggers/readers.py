# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads back what the loggers wrote: every function returns metric key -> [(step, value), ...], steps ascending."""

import sys
from pathlib import Path

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.loggers.jsonl import read_metrics
from nemo_rl_moe.loggers.wandb_files import wandb_files, wandb_rows

MetricHistory = dict[str, list[tuple[int, float]]]


def read_jsonl(path: Path) -> MetricHistory:
    """Reads a `metrics.jsonl`.

    Raises:
        DataError: A whole line is not a step record.
    """
    history: MetricHistory = {}
    for record in read_metrics(path):
        for key, value in record.metrics.items():
            history.setdefault(key, []).append((record.step, value))
    return _sorted(history)


def read_tensorboard(folder: Path) -> MetricHistory:
    """Reads the scalars of all event files in a folder; values are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 asks for every scalar; the default keeps a random 10,000 a key.
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    keys = accumulator.Tags()["scalars"]
    return _sorted({key: [(event.step, event.value) for event in accumulator.Scalars(key)] for key in keys})


def read_wandb_offline(folder: Path) -> MetricHistory:
    """Reads the history of the one W&B run below a folder, such as `<run folder>/wandb`.

    A run that was resumed has several files: each replaces what earlier ones hold from its first step on. W&B's own
    columns, which begin with an underscore, and values that are not numbers are left out.

    Raises:
        DataError: There is no `.wandb` file, those of several runs, or one that is damaged before its end.
    """
    files = wandb_files(folder)
    if len(ids := {path.name for path in files}) != 1:
        raise DataError(f"{folder}: expected the run-*.wandb files of one run, found {len(ids)} runs")
    rows: list[tuple[int, dict[str, float]]] = []
    for path in files:
        later = list(wandb_rows(path))
        first = min((step for step, _ in later), default=None)
        rows = [row for row in rows if first is None or row[0] < first] + later
    history: MetricHistory = {}
    for step, row in rows:
        for key, value in row.items():
            history.setdefault(key, []).append((step, value))
    return _sorted(history)


def read_mlflow(tracking_uri: str, experiment_name: str, run_name: str | None = None) -> MetricHistory:
    """Reads the newest run of an MLflow experiment, or the newest one that has a certain name.

    Raises:
        DataError: There is no such experiment or run.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name(experiment_name)
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"]) if experiment else []
    run = next((run for run in runs if run_name is None or run.info.run_name == run_name), None)
    if run is None:
        raise DataError(f"{tracking_uri}: no run {run_name or ''} in the experiment {experiment_name!r}")
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return _sorted({key: [(entry.step, _unclamped(entry.value)) for entry in history[key]] for key in history})


def _unclamped(value: float) -> float:
    """A local MLflow store writes an infinity as the largest float64."""
    return value * float("inf") if abs(value) == sys.float_info.max else value


def _sorted(history: MetricHistory) -> MetricHistory:
    return {key: sorted(points, key=lambda point: point[0]) for key, points in sorted(history.items())}

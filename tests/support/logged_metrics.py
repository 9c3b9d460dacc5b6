# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Readers of what the loggers wrote: key to `(step, value)` pairs, steps ascending; plots as PNG files."""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from nemo_rl_moe.runs.folder.metrics import MetricHistory as MetricHistory
from nemo_rl_moe.runs.folder.metrics import read_history
from nemo_rl_moe.runs.loggers.wandb_files import wandb_files, wandb_history

# How MLflow names the plots of a step; older versions put % where newer ones put +.
_MLFLOW_PLOT = re.compile(r"images/(?P<key>.+?)[+%]step[+%](?P<step>\d+)[+%]timestamp[+%].*\.png")

PlotHistory = dict[str, list[tuple[int, bytes]]]


def read_jsonl(path: Path) -> MetricHistory:
    """Read a `metrics.jsonl`."""
    return _sorted(read_history(path))


def read_tensorboard(folder: Path) -> MetricHistory:
    """Read the scalars of all event files in a folder; values are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 asks for every scalar; the default keeps a random 10,000 a key.
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    keys = accumulator.Tags()["scalars"]
    return _sorted({key: [(event.step, event.value) for event in accumulator.Scalars(key)] for key in keys})


def read_tensorboard_plots(folder: Path) -> PlotHistory:
    """Read the images of all event files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0})
    accumulator.Reload()
    keys = accumulator.Tags()["images"]
    return {key: [(event.step, event.encoded_image_string) for event in accumulator.Images(key)] for key in keys}


def read_wandb_offline(folder: Path) -> MetricHistory:
    """Read the history of the one W&B run below a folder, such as `<run folder>/wandb`.

    A run that was resumed has several files: each replaces what earlier ones hold from its first step on. W&B's own
    columns, which begin with an underscore, and values that are not numbers are left out.
    """
    rows: list[tuple[int, dict[tuple[str, ...], Any]]] = []
    for path in _files_of_one_wandb_run(folder):
        later = list(wandb_history(path))
        first = min((step for step, _ in later), default=None)
        rows = [row for row in rows if first is None or row[0] < first] + later
    history: MetricHistory = {}
    for step, row in rows:
        for (key, *part), value in row.items():
            if not part and not key.startswith("_") and isinstance(value, int | float):
                history.setdefault(key, []).append((step, float(value)))
    return _sorted(history)


def read_wandb_offline_plots(folder: Path) -> PlotHistory:
    """Read the images in that history."""
    plots: PlotHistory = {}
    for path in _files_of_one_wandb_run(folder):
        rows = list(wandb_history(path))
        first = min((step for step, _ in rows), default=None)
        for points in plots.values():
            points[:] = [point for point in points if first is None or point[0] < first]
        for step, row in rows:
            for (key, *part), value in row.items():
                if part == ["_type"] and value == "image-file":
                    image = path.parent / "files" / row[key, "path"]
                    plots.setdefault(key, []).append((step, image.read_bytes()))
    return {key: points for key, points in plots.items() if points}


def _files_of_one_wandb_run(folder: Path) -> list[Path]:
    files = wandb_files(folder)
    assert len({path.name for path in files}) == 1, files
    return files


def read_mlflow(tracking_uri: str, experiment_name: str, run_name: str | None = None) -> MetricHistory:
    """Read the newest run of an MLflow experiment, or the newest one that has a certain name."""
    client, run = _mlflow_run(tracking_uri, experiment_name, run_name)
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return _sorted({key: [(entry.step, _unclamped(entry.value)) for entry in history[key]] for key in history})


def read_mlflow_plots(tracking_uri: str, experiment_name: str, run_name: str | None = None) -> PlotHistory:
    """Read the images that such a run has for its steps."""
    client, run = _mlflow_run(tracking_uri, experiment_name, run_name)
    plots: PlotHistory = {}
    with tempfile.TemporaryDirectory() as folder:
        for entry in client.list_artifacts(run.info.run_id, "images"):
            if found := _MLFLOW_PLOT.fullmatch(entry.path):
                content = Path(client.download_artifacts(run.info.run_id, entry.path, folder)).read_bytes()
                # A slash cannot stand in the name of a file.
                plots.setdefault(re.sub("[~#]", "/", found["key"]), []).append((int(found["step"]), content))
    return {key: sorted(points, key=lambda point: point[0]) for key, points in sorted(plots.items())}


def _mlflow_run(tracking_uri: str, experiment_name: str, run_name: str | None) -> tuple[Any, Any]:
    """Return a client, and the newest run of a name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    return client, next(run for run in runs if run_name is None or run.info.run_name == run_name)


def _unclamped(value: float) -> float:
    """Return a local MLflow store writes an infinity as the largest float64."""
    return value * float("inf") if abs(value) == sys.float_info.max else value


def _sorted(history: MetricHistory) -> MetricHistory:
    return {key: sorted(points, key=lambda point: point[0]) for key, points in sorted(history.items())}

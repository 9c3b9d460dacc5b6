# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plots in real TensorBoard files, W&B folders and MLflow stores, read back and compared with the load matrix."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from nemo_rl_moe.runs.loggers import expert_load_plots as drawn_plots
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.expert_load_plots import HEATMAP_KEY, SORTED_LOAD_KEY, HeatmapGeometry, cell_colors
from nemo_rl_moe.runs.loggers.factory import LoggerResume, build_loggers, mlflow_tracking_uri
from nemo_rl_moe.runs.loggers.isolated import Patience
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.loggers.wandb import OUTLIER_CHART_KEY, OutlierChart
from nemo_rl_moe.runs.loggers.wandb_files import wandb_files, wandb_records
from tests.support.loggers import (
    MetricHistory,
    PlotHistory,
    load_of,
    read_jsonl,
    read_mlflow,
    read_mlflow_plots,
    read_tensorboard,
    read_tensorboard_plots,
    read_wandb_offline,
    read_wandb_offline_plots,
    settings_for,
)

BACKENDS = ("tensorboard", "wandb", "mlflow")
OUTLIER = "train/moe_expert_utilization/layer_1_expert_"


def load_at(step: int, attempt: int) -> ExpertLoad:
    """Differs with the step and the attempt; one expert is dead."""
    return load_of([step + 1, attempt, 10, 0], [7, 20, step, 5 * attempt])


def metrics_at(step: int) -> dict[str, float]:
    return {"train/loss": 1 / step, f"{OUTLIER}{step % 3}": 1.0 + step}


def log_attempt(
    run_folder: Path, attempt: int, steps: range, every: int = 2, backends: Sequence[str] = BACKENDS
) -> str:
    """Logs steps to backends, resumed where the first step is not 1; returns what the console showed."""
    resume = None
    if steps.start > 1:
        rewind_run_folder(run_folder, steps.start - 1)
        resume = LoggerResume(steps.start - 1, {})
    stream = io.StringIO()
    settings = settings_for(run_folder.parent, *backends, plots_every=every)
    console = ConsoleLogger(9, stream=stream)
    # These steps come faster than anything can be drawn, on a busy machine above all.
    with build_loggers(settings, run_folder, console, resume, Patience(most_plots_waiting=9, closing_s=90)) as loggers:
        for step in steps:
            loggers.log_artifact(step, EXPERT_LOAD.name, load_at(step, attempt))
            loggers.log_step(step, metrics_at(step))
    return stream.getvalue()


def plots_of(run_folder: Path) -> dict[str, PlotHistory]:
    uri = mlflow_tracking_uri(settings_for(run_folder.parent, *BACKENDS))
    return {
        "tensorboard": read_tensorboard_plots(run_folder / "tensorboard"),
        "wandb": read_wandb_offline_plots(run_folder / "wandb"),
        "mlflow": read_mlflow_plots(uri, "e"),
    }


def metrics_of(run_folder: Path) -> dict[str, MetricHistory]:
    uri = mlflow_tracking_uri(settings_for(run_folder.parent, *BACKENDS))
    return {
        "tensorboard": read_tensorboard(run_folder / "tensorboard"),
        "wandb": read_wandb_offline(run_folder / "wandb"),
        "mlflow": read_mlflow(uri, "e"),
    }


def assert_shows(png: bytes, load: ExpertLoad) -> None:
    """The colours of all cells, beside the numbers in their middle."""
    image = PIL.Image.open(io.BytesIO(png)).convert("RGB")
    counts = load.counts.numpy()
    geometry = HeatmapGeometry(*counts.shape)
    assert image.size == geometry.size
    wanted = 255 * cell_colors(counts)
    for row, expert in np.ndindex(*counts.shape):
        x, y = geometry.center(row, expert)
        assert image.getpixel((x, y - 15)) == pytest.approx(wanted[row, expert], abs=1)


def test_every_backend_holds_the_plots_and_each_shows_its_steps_load(run_folder: Path) -> None:
    output = log_attempt(run_folder, 1, range(1, 6))
    assert "warning" not in output
    for name, plots in plots_of(run_folder).items():
        assert sorted(plots) == [HEATMAP_KEY, SORTED_LOAD_KEY], name
        for points in plots.values():
            assert [step for step, _ in points] == [1, 2, 4], name
        for step, content in plots[HEATMAP_KEY]:
            assert_shows(content, load_at(step, 1))
    wanted = read_jsonl(run_folder / "metrics.jsonl")
    assert [step for step, _ in wanted["train/loss"]] == list(range(1, 6))
    for name, metrics in metrics_of(run_folder).items():
        assert metrics.keys() == wanted.keys(), name
        for key, values in metrics.items():
            assert dict(values) == pytest.approx(dict(wanted[key])), name
            assert len(values) == len(wanted[key])


def test_a_resumed_run_holds_each_plot_once(run_folder: Path) -> None:
    log_attempt(run_folder, 1, range(1, 7))
    output = log_attempt(run_folder, 2, range(4, 9))
    assert "warning" not in output
    for name, plots in plots_of(run_folder).items():
        for points in plots.values():
            assert [step for step, _ in points] == [1, 2, 4, 6, 8], name
        for step, content in plots[HEATMAP_KEY]:
            # MLflow takes nothing back: as with metrics, the first attempt's stay.
            is_of_first = step < 4 or (name == "mlflow" and step < 7)
            assert_shows(content, load_at(step, 1 if is_of_first else 2))


@pytest.mark.slow
def test_a_store_without_a_place_for_plots_loses_no_metric(run_folder: Path) -> None:
    (run_folder.parent.parent / "mlartifacts").write_text("a file in the way")
    output = log_attempt(run_folder, 1, range(1, 4)) + log_attempt(run_folder, 2, range(4, 9))
    warnings = [line for line in output.splitlines() if line.startswith("warning")]
    assert [warning.partition(":")[2].partition(":")[0] for warning in warnings] == [
        " logger mlflow does not take the plots of step 1",
        " logger mlflow does not take the plots of step 4",
    ]
    assert [step for step, _ in metrics_of(run_folder)["mlflow"]["train/loss"]] == list(range(1, 9))


def test_wandb_has_the_plot_in_the_steps_row_and_all_outliers_on_one_chart(run_folder: Path) -> None:
    log_attempt(run_folder, 1, range(1, 6), backends=["wandb"])
    (file,) = wandb_files(run_folder / "wandb")
    rows = list(wandb_records(file, "history"))
    assert len(rows) == 5, "no row of its own for a plot"
    keys = {item.nested_key[0] for item in rows[3].item}
    assert {HEATMAP_KEY, SORTED_LOAD_KEY, "train/loss", f"{OUTLIER_CHART_KEY}_table"} <= keys
    tables = sorted((file.parent / "files" / "media" / "table").rglob("*outliers_table_4_*.json"))
    table = json.loads(tables[0].read_text())
    assert table["columns"] == ["step", "utilization", "expert"]
    assert table["data"] == [[step, 1.0 + step, f"layer_1_expert_{step % 3}"] for step in (1, 2, 3, 4)]
    defined = {metric.name or metric.glob_name: metric for metric in wandb_records(file, "metric")}
    assert defined["train/moe_expert_utilization/*"].options.hidden
    assert defined["val/loss"].summary.min
    assert defined["train/moe/avg_overload_factor"].summary.max
    assert not defined["train/moe/avg_overload_factor"].summary.min
    settings = [tuple(item.nested_key) for config in wandb_records(file, "config") for item in config.update]
    assert ("_wandb", "visualize", OUTLIER_CHART_KEY) in settings


@pytest.mark.slow
def test_the_chart_of_a_resumed_run_begins_at_the_runs_first_step(run_folder: Path) -> None:
    log_attempt(run_folder, 1, range(1, 7), backends=["wandb"])
    log_attempt(run_folder, 2, range(4, 9), backends=["wandb"])
    file = wandb_files(run_folder / "wandb")[-1]
    (path,) = (file.parent / "files" / "media" / "table").rglob("*outliers_table_8_*.json")
    assert [row[0] for row in json.loads(path.read_text())["data"]] == list(range(1, 9))


def test_without_plots_wandb_hides_no_outliers(run_folder: Path) -> None:
    log_attempt(run_folder, 1, range(1, 4), every=0, backends=["wandb"])
    (file,) = wandb_files(run_folder / "wandb")
    assert not any(metric.options.hidden for metric in wandb_records(file, "metric"))
    assert not list((file.parent / "files").rglob("*outliers_table*"))


def test_plots_that_cannot_be_drawn_leave_the_chart_of_the_outliers(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(drawn_plots, "expert_load_plots", fail)
    log_attempt(run_folder, 1, range(1, 5), backends=["wandb"])
    (file,) = wandb_files(run_folder / "wandb")
    (path,) = (file.parent / "files" / "media" / "table").rglob("*outliers_table_4_*.json")
    assert [row[0] for row in json.loads(path.read_text())["data"]] == [1, 2, 3, 4]


def test_a_chart_that_fails_costs_no_metric(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(OutlierChart, "draw", fail)
    assert "warning" not in log_attempt(run_folder, 1, range(1, 4), backends=["wandb"])
    assert [step for step, _ in read_wandb_offline(run_folder / "wandb")["train/loss"]] == [1, 2, 3]


def test_the_chart_of_a_long_run_keeps_what_wandb_shows() -> None:
    chart = OutlierChart()
    for step in range(3000):
        chart.add(step, {f"{OUTLIER}{expert}": 1.0 for expert in range(4)} | {"train/loss": 2.0})
    rows = list(chart.rows)
    assert len(rows) == 10_000
    assert (rows[0], rows[-1]) == ((500, 1.0, "layer_1_expert_0"), (2999, 1.0, "layer_1_expert_3"))

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of agreement: what is drawn are the agreement statistics, and it comes when those of the load do."""

from io import BytesIO

import numpy as np
import PIL.Image
import pytest

from nemo_rl_moe.routing.agreement.statistics import RoutingReport
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD, ROUTING
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.runs.loggers.expert_load_plots import HEATMAP_KEY, SORTED_LOAD_KEY
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.runs.loggers.plots import AGREEMENT_KEY, draw_agreement, routing_plots
from nemo_rl_moe.runs.loggers.step_plots import StepPlots
from tests.support.loggers import ListBackend, load_of
from tests.support.made_runs import routing_report


def drawn(report: RoutingReport) -> tuple[dict[str, list[tuple[int, float]]], list[str], list[str]]:
    """Points of each line by its label, the labels of the layers, and the texts of the title."""
    figure = draw_agreement(4, report.layers, report.totals.rows.numpy())
    (axes,) = figure.axes
    lines = {line.get_label(): list(zip(*map(np.ndarray.tolist, line.get_data()), strict=True)) for line in axes.lines}
    low, high = axes.get_ylim()
    assert all(low < value < high for points in lines.values() for _, value in points), "nothing is cut off"
    return lines, [tick.get_text() for tick in axes.get_xticklabels()], [text.get_text() for text in figure.texts]


def test_lines_are_the_agreement_of_each_layer() -> None:
    lines, labels, (title, summary) = drawn(routing_report([0, 13], layers=[1, 3], replays=True))
    assert lines == {
        "as training took them": [(0, 1.0), (1, 1.0)],
        "as routers would choose": [(0, 1.0), (1, pytest.approx(26 / 39))],
    }
    assert labels == ["1", "3"]
    assert title == "Agreement with the routes of the rollouts at step 4"
    assert summary == "lowest: layer 3, 0.6667 by itself;  78 of 78 rows usable"


def test_a_layer_without_usable_rows_is_left_out() -> None:
    lines, labels, (_, summary) = drawn(routing_report([0, 0, 3], missing=[0, 39]))
    assert [place for place, _ in lines["as routers would choose"]] == [0, 2]
    assert labels == ["0", "1", "2"]
    assert summary.endswith("78 of 117 rows usable")
    assert routing_plots(1, (0,), routing_report([0], missing=[39]).totals.rows.numpy()) == {}


def test_many_layers_are_not_all_named() -> None:
    _, labels, _ = drawn(routing_report([0] * 60))
    assert labels == [str(layer) for layer in range(0, 60, 3)]


def test_it_comes_with_the_plots_of_the_load() -> None:
    backend = ListBackend()
    notices = Notices(pytest.fail, pytest.fail)
    # The first plot imports matplotlib, which takes long on a busy machine.
    patience = Patience(most_plots_waiting=99, silence_s=200, closing_s=200)
    isolated = IsolatedLogger("x", backend.open, notices, patience=patience)
    plots = StepPlots(2, notices)
    loggers = FanOutLogger([], notices, [isolated], closing_s=patience.closing_s, plots=plots)
    for step in range(1, 5):
        loggers.log_artifact(step, ROUTING.name, routing_report([1]))
        loggers.log_artifact(step, EXPERT_LOAD.name, load_of([3, 1], [0, 4]))
        loggers.log_step(step, {"train/loss": 1.0})
    loggers.close()
    keys = {AGREEMENT_KEY, HEATMAP_KEY, SORTED_LOAD_KEY}
    assert {step: set(plots) for step, plots in backend.plots.items()} == {1: keys, 2: keys, 4: keys}


def test_it_is_a_plot() -> None:
    (content,) = routing_plots(1, (0,), routing_report([3]).totals.rows.numpy()).values()
    assert PIL.Image.open(BytesIO(content)).size == (1000, 560)

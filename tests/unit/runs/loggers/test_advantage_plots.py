# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of experts by advantage: what is drawn are the scores, and it comes when those of the load do."""

from io import BytesIO

import numpy as np
import PIL.Image
import pytest
import torch

from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores
from nemo_rl_moe.runs.folder.artifacts import EXPERTS_BY_ADVANTAGE
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.runs.loggers.plots import ADVANTAGE_KEY, advantage_plots, draw_advantages
from nemo_rl_moe.runs.loggers.step_plots import StepPlots
from tests.support.loggers import ListBackend

SCORES = np.array([[0.5, -1.5, np.nan], [6.0, 0.0, -0.5]])


def test_cells_are_the_scores_and_the_title_names_the_furthest() -> None:
    figure = draw_advantages(3, (1, 13), SCORES)
    (image,) = figure.axes[0].images
    drawn = image.get_array()
    assert drawn is not None
    np.testing.assert_array_equal(np.ma.filled(drawn, np.nan), SCORES)
    assert image.get_clim() == (-6.0, 6.0)
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["1", "13"]
    title, summary = (text.get_text() for text in figure.texts)
    assert title == "Experts by advantage at step 3"
    # (0.25 + 2.25 + 36 + 0 + 0.25) / 5 - 1
    assert summary == "furthest: layer 13, expert 0, +6.0;  mean square +6.75 beyond chance"


def test_scores_that_chance_explains_are_pale() -> None:
    assert draw_advantages(1, (0,), np.array([[0.5, -1.0]])).axes[0].images[0].get_clim() == (-4.0, 4.0)


def test_without_a_score_there_is_no_plot() -> None:
    assert advantage_plots(1, (0,), np.full((1, 4), np.nan)) == {}


@pytest.mark.parametrize("shape", [(1, 2), (60, 256)])
def test_it_is_a_plot_that_no_model_makes_too_large(shape: tuple[int, int]) -> None:
    (content,) = advantage_plots(1, range(shape[0]), np.random.default_rng(0).normal(size=shape)).values()
    width, height = PIL.Image.open(BytesIO(content)).size
    assert width == 1010
    assert 300 < height < 1100


def test_it_comes_with_the_plots_of_the_load() -> None:
    backend, notices = ListBackend(), Notices(pytest.fail, pytest.fail)
    # The first plot imports matplotlib, which takes long on a busy machine.
    patience = Patience(most_plots_waiting=99, silence_s=200, closing_s=200)
    isolated = IsolatedLogger("x", backend.open, notices, patience=patience)
    plots = StepPlots(2, notices)
    loggers = FanOutLogger([], notices, [isolated], closing_s=patience.closing_s, plots=plots)
    for step in range(1, 5):
        loggers.log_artifact(step, EXPERTS_BY_ADVANTAGE.name, AdvantageScores((0,), torch.tensor([[1.0, -1.0]])))
        loggers.log_step(step, {"train/loss": 1.0})
    loggers.close()
    assert {step: set(found) for step, found in backend.plots.items()} == {s: {ADVANTAGE_KEY} for s in (1, 2, 4)}

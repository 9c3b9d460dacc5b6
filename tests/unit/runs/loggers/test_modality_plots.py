# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The plot of experts by modality: its cells and words are right, and it comes when that of the load does."""

import io
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.expert_load_plots import HEATMAP_KEY, SORTED_LOAD_KEY
from nemo_rl_moe.runs.loggers.factory import build_loggers
from nemo_rl_moe.runs.loggers.isolated import Patience
from nemo_rl_moe.runs.loggers.plots import MODALITY_KEY, draw_modalities, modality_plots
from tests.support.loggers import read_tensorboard_plots, settings_for

# Layer 2 parts the kinds wholly on its first two experts, layer 13 not at all; nobody goes to its last expert.
COUNTS, IMAGES = np.array([[40, 60, 0], [50, 50, 0]]), np.array([[40, 0, 0], [20, 20, 0]])


def test_cells_are_the_leanings_and_words_the_shares() -> None:
    figure = draw_modalities(3, (2, 13), COUNTS, IMAGES, 1)
    (image,) = figure.axes[0].images
    drawn = image.get_array()
    assert drawn is not None
    np.testing.assert_array_equal(np.ma.filled(drawn, np.nan), [[1, -1, np.nan], [0, 0, np.nan]])
    assert image.get_clim() == (-1.0, 1.0)
    words = [(text.get_position(), text.get_text(), text.get_color()) for text in figure.axes[0].texts]
    assert words == [
        ((0, 0), "100%", "white"),
        ((1, 0), "0%", "white"),
        ((0, 1), "40%", "black"),
        ((1, 1), "40%", "black"),
    ]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["2", "13"]
    title, summary = (text.get_text() for text in figure.texts)
    assert title == "Experts of image and of text tokens at step 3"
    assert summary == (
        "image tokens: 40.0% overall;  separation: 0.50 on average, 1.00 in layer 2 (0: chance, 1: no expert in common)"
    )


@pytest.mark.parametrize("images", [0 * IMAGES, COUNTS], ids=["no image", "no text"])
def test_tokens_of_one_kind_have_no_plot(images: np.ndarray) -> None:
    assert modality_plots(1, (2, 13), COUNTS, images, 1) == {}


@pytest.mark.parametrize("shape", [(1, 2), (60, 256)])
def test_it_is_a_plot_that_no_model_makes_too_large(shape: tuple[int, int]) -> None:
    counts = np.random.default_rng(0).integers(20, 60, shape)
    (content,) = modality_plots(1, range(shape[0]), counts, counts // 3, None).values()
    width, height = PIL.Image.open(BytesIO(content)).size
    assert width == 1010
    assert 300 < height < 1100


@pytest.mark.full
def test_it_is_in_tensorboard_beside_the_load_and_of_vision_alone(tmp_path: Path) -> None:
    found = {}
    for name, images in (("vision", torch.from_numpy(IMAGES)), ("text", None)):
        folder = tmp_path / name / "exp_001"
        folder.mkdir(parents=True)
        settings = settings_for(folder.parent, "tensorboard", plots_every=2)
        console = ConsoleLogger(9, stream=io.StringIO())
        # The first plot imports matplotlib, which takes long on a busy machine.
        patience = Patience(most_plots_waiting=99, silence_s=200, closing_s=200)
        with build_loggers(settings, folder, console, None, patience) as loggers:
            for step in (1, 2, 3):
                loggers.log_artifact(step, EXPERT_LOAD.name, ExpertLoad((2, 13), torch.from_numpy(COUNTS), images, 1))
                loggers.log_step(step, {"train/loss": 1.0})
        found[name] = read_tensorboard_plots(folder / "tensorboard")
    of_load = {HEATMAP_KEY, SORTED_LOAD_KEY}
    assert found["text"].keys() == of_load
    assert found["vision"].keys() == of_load | {MODALITY_KEY}
    assert [step for step, _ in found["vision"][MODALITY_KEY]] == [1, 2]
    (drawn,) = modality_plots(2, (2, 13), COUNTS, IMAGES, 1).values()
    read, expected = (np.asarray(PIL.Image.open(BytesIO(one))) for one in (found["vision"][MODALITY_KEY][1][1], drawn))
    np.testing.assert_array_equal(read, expected)
    # In the middle of the first two cells of layer 2: deep red, and deep blue.
    y, left = 84 + 40, 80 + np.array([60, 800 // 3 + 60])
    red, blue = read[y, left, :3].astype(int)
    assert red[0] > 2 * red[2]
    assert blue[2] > 2 * blue[0]

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The plots of the expert load: what is drawn is compared with the load matrix, pixel by pixel."""

import itertools
from io import BytesIO

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from nemo_rl_moe.routing.metrics.load_arrays import utilization
from nemo_rl_moe.runs.loggers.expert_load_plots import (
    DEAD_COLOR,
    NO_LOAD_COLOR,
    HeatmapGeometry,
    as_png,
    cell_colors,
    draw_heatmap,
    draw_sorted_load,
    expert_load_plots,
)
from tests.support.quick_list import some_of

# Two layers of four experts: fair, half, twice, dead; and one expert with everything.
COUNTS = np.array([[10, 5, 20, 0], [0, 0, 0, 7]])
LAYERS = (1, 4)


def pixels_of(png: bytes) -> NDArray[np.uint8]:
    return np.asarray(PIL.Image.open(BytesIO(png)).convert("RGB"))


def heatmap_of(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    return pixels_of(as_png(draw_heatmap(3, range(len(counts)), counts)))


def test_colors_by_hand() -> None:
    counts = np.array([[4, 2, 8, 2], [1, 16, 0, 1]])  # shares 1, 1/2, 2, 1/2; then 2/9, 32/9, dead, 2/9
    fair, half, twice, _ = (cell_colors(counts)[0] * 255).round().astype(int)
    assert fair.tolist() == [247, 247, 247]
    np.testing.assert_allclose(half, [0x92, 0xC5, 0xDE], atol=2)
    np.testing.assert_allclose(twice, [0xF4, 0xA5, 0x82], atol=2)
    low, high, dead, _ = (cell_colors(counts)[1] * 255).round().astype(int)
    assert low.tolist() == [0x21, 0x66, 0xAC], "a quarter and less is the end of the scale"
    assert high[0] > twice[0] - 80 and high[1] < twice[1]  # noqa: PT018
    assert dead.tolist() == [0, 0, 0]


def test_a_layer_without_any_load_is_grey_and_none_of_it_is_dead() -> None:
    colors = cell_colors(np.array([[0, 0], [0, 3]]))
    np.testing.assert_allclose(colors[0], [NO_LOAD_COLOR] * 2)
    np.testing.assert_allclose(colors[1, 0], DEAD_COLOR)


@given(arrays(np.int64, (3, 16), elements=st.integers(0, 1000)))
def test_redder_is_busier(counts: NDArray[np.int64]) -> None:
    loads, colors = utilization(counts), cell_colors(counts)
    for row in range(3):
        alive = np.flatnonzero(loads[row] > 0)
        order = alive[np.argsort(loads[row, alive], kind="stable")]
        warmth = colors[row, order, 0] - colors[row, order, 2]
        # Beyond twice the share, red itself gets darker.
        light = loads[row, order] <= 2
        assert (np.diff(warmth[light]) >= -1e-9).all()
        assert (warmth[loads[row, order] > 1.05] > 0).all()
        assert (warmth[loads[row, order] < 0.95] < 0).all()


def test_the_cells_are_where_a_reader_looks_for_them() -> None:
    pixels = heatmap_of(COUNTS)
    assert pixels.shape == (348, 850, 3)
    # Layer in rows from the top, expert in columns from the left: cells of 72 x 40 pixels from (80, 84) on.
    wanted = (cell_colors(COUNTS) * 255).round().astype(int)
    for row in range(2):
        for expert in range(4):
            top, left = 84 + 40 * row, 80 + 72 * expert
            # Beside the number that is written in the middle, and inside the frame.
            for cell in (pixels[top + 5, left + 5], pixels[top + 33, left + 65]):
                np.testing.assert_allclose(cell.astype(int), wanted[row, expert], atol=1)
    assert (pixels[84 + 20, 80 + 4 * 72 + 5] == 255).all(), "white beside the last expert"


@pytest.mark.parametrize(
    ("num_layers", "num_experts"), some_of([(61, 256), (48, 128), (1, 2), (4, 512), (94, 64), (27, 100)], 2)
)
def test_every_cell_of_a_model_is_drawn(num_layers: int, num_experts: int) -> None:
    random = np.random.default_rng(0)
    counts = random.poisson(40 * random.lognormal(0, 1, (num_layers, num_experts)))
    counts[num_layers // 2, num_experts // 3] = 0
    pixels = heatmap_of(counts)
    geometry = HeatmapGeometry(num_layers, num_experts)
    assert pixels.shape[:2] == geometry.size[::-1]
    width, height = geometry.cell
    wanted = (cell_colors(counts) * 255).round().astype(int)
    for (row, expert), _ in np.ndenumerate(counts):
        x, y = geometry.center(row, expert)
        if width > 40:  # a number is written in the middle
            x, y = x - width // 2 + 4, y - height // 2 + 4
        np.testing.assert_allclose(pixels[y, x].astype(int), wanted[row, expert], atol=1, err_msg=f"{row}, {expert}")


def test_labels_are_the_models_own_layers_and_name_what_stands_out() -> None:
    figure = draw_heatmap(120, LAYERS, COUNTS)
    figure.canvas.draw()
    heatmap = figure.axes[0]
    assert [label.get_text() for label in heatmap.get_yticklabels()] == ["1", "4"]
    assert [label.get_text() for label in heatmap.get_xticklabels()] == ["0", "1", "2", "3"]
    written = [text.get_text() for text in heatmap.texts]
    assert written == ["1.14", "0.57", "2.29", "0.00", "0.00", "0.00", "0.00", "4.00"]
    assert [text.get_text() for text in figure.texts] == [
        "Expert load at step 120",
        "busiest: layer 4, expert 3, 4.00 times its fair share;  dead: 4 of 8 experts in 2 layers",
    ]


def test_labels_of_a_large_model_do_not_overlap() -> None:
    figure = draw_heatmap(1, range(3, 64), np.ones((61, 256), dtype=np.int64))
    figure.canvas.draw()
    for labels, side in ((figure.axes[0].get_xticklabels(), 0), (figure.axes[0].get_yticklabels(), 1)):
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
        assert len(boxes) > 10
        spans = sorted((box.x0, box.x1) if side == 0 else (box.y0, box.y1) for box in boxes)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    assert figure.texts[1].get_text().endswith("dead: none of 15,616 experts")


def test_the_sorted_load_of_a_few_layers_is_a_line_each() -> None:
    axes = draw_sorted_load(3, LAYERS, COUNTS).axes[0]
    lines = {str(line.get_label()): np.asarray(line.get_ydata()) for line in axes.lines}
    np.testing.assert_allclose(lines["layer 1"], np.array([20, 10, 5, 0]) * 4 / 35)
    np.testing.assert_allclose(lines["layer 4"], [4, 0, 0, 0])
    np.testing.assert_array_equal(lines["fair share"], [1, 1])
    assert axes.get_ylim()[1] >= 4


def test_the_sorted_load_of_many_layers_shows_their_spread_and_the_most_uneven() -> None:
    random = np.random.default_rng(0)
    counts = random.poisson(100, (48, 128))
    counts[7, 5] = 4000
    axes = draw_sorted_load(3, range(100, 148), counts).axes[0]
    lines = {str(line.get_label()): np.asarray(line.get_ydata()) for line in axes.lines}
    descending = -np.sort(-utilization(counts), axis=-1)
    np.testing.assert_allclose(lines["layer 107, most uneven"], descending[7])
    np.testing.assert_allclose(lines["median of the layers"], np.median(descending, axis=0))
    assert axes.get_ylim()[1] > descending.max() > 20


def test_layers_without_load_have_no_place_in_the_sorted_load() -> None:
    counts = np.full((12, 4), 5)
    counts[3] = 0
    axes = draw_sorted_load(3, range(12), counts).axes[0]
    for line in axes.lines:
        np.testing.assert_allclose(np.asarray(line.get_ydata())[1:3], 1.0, atol=0.2)
    for band in axes.collections:
        np.testing.assert_allclose(np.asarray(band.get_paths()[0].vertices)[:, 1], 1.0)
    unused = expert_load_plots(3, LAYERS, np.zeros_like(COUNTS))
    assert len(unused) == 2


def test_the_line_of_random_routing_is_what_random_routing_gives() -> None:
    """Over many draws; the approximation is to about a hundredth at 400 tokens an expert."""
    counts = np.random.default_rng(0).multinomial(400 * 64, np.full(64, 1 / 64), size=400)
    axes = draw_sorted_load(1, range(400), counts).axes[0]
    by_chance = next(np.asarray(line.get_ydata()) for line in axes.lines if line.get_label() == "routing at random")
    mean = -np.sort(-utilization(counts), axis=-1).mean(0)
    np.testing.assert_allclose(by_chance, -np.sort(-utilization(counts), axis=-1).mean(0), atol=0.01)
    assert mean[0] > 1.1

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of experts by who wrote the token: what is written is read back, also behind a rewind."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nemo_rl_moe.routing.metrics.writers import WriterLoad
from nemo_rl_moe.runs.folder.writer_load import FOLDER_NAME, WriterLoadWriter, read_writer_load
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.loggers.writer_plots import WRITER_KEY, draw_writers, writer_plots

LAYERS = (1, 3)


def load(step: int) -> WriterLoad:
    return WriterLoad(LAYERS, (np.arange(24) * step).reshape(4, 2, 3))


def write(folder: Path, steps: dict[int, WriterLoad]) -> None:
    writer = WriterLoadWriter(folder, pytest.fail)
    for step, of_step in steps.items():
        writer.write(step, of_step)
    writer.close()


def test_loads_are_read_back_and_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    write(tmp_path, {step: load(step) for step in (1, 2, 5)})
    table = pq.read_table(tmp_path / FOLDER_NAME)
    assert table.column_names == ["step", "writer", "layer", "expert", "count"]
    assert table.num_rows == 72
    rewind_run_folder(tmp_path, 2)
    write(tmp_path, {3: load(7)})
    found = read_writer_load(tmp_path)
    assert (found.steps.tolist(), found.layers.tolist()) == ([1, 2, 3], [1, 3])
    np.testing.assert_array_equal(found.counts, np.stack([load(step).counts for step in (1, 2, 7)]))


def test_a_panel_for_each_writer_says_how_many_of_the_tokens_it_has() -> None:
    counts = np.zeros((4, 2, 3), dtype=np.int64)
    counts[0], counts[2], counts[3] = 6, [[3, 0, 0], [1, 1, 1]], [[0, 3, 0], [1, 1, 1]]
    figure = draw_writers("Experts of step 3", WriterLoad(LAYERS, counts))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "in the prompt (75% of tokens)",
        "in earlier responses, or calls (0% of tokens)",
        "between responses, or results (12% of tokens)",
        "in the last response (12% of tokens)",
    ]
    assert [text.get_text() for text in figure.axes[2].texts] == ["3.0", "0.0", "0.0", "1.0", "1.0", "1.0"]
    assert [text.get_text() for text in figure.texts] == [
        "Experts of step 3",
        "load over fair share: blue below, red above;  results from own tokens: 0.50 bits",
    ]


def test_a_large_model_has_a_plot_of_bounded_size_and_a_step_without_tokens_none() -> None:
    large = WriterLoad(tuple(range(60)), np.ones((4, 60, 256), dtype=np.int64))
    assert writer_plots(1, large)[WRITER_KEY][:4] == b"\x89PNG"
    height = draw_writers("", large).get_size_inches()[1] * 100
    assert 600 < height < 1400
    assert writer_plots(1, WriterLoad((0,), np.zeros((4, 1, 8), dtype=np.int64))) == {}

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of experts by advantage: what is written is read back, also behind a rewind, and in the page."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores
from nemo_rl_moe.runs.folder.advantages import FOLDER_NAME, AdvantageHistory, AdvantageWriter, read_advantages
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.report.arrays import ArrayPool
from nemo_rl_moe.runs.report.routing_view import advantage_view
from tests.unit.runs.report.packed_arrays import unpacked

LAYERS = (1, 3)


def scores(step: int) -> AdvantageScores:
    """Scores in which an expert of the second layer has none."""
    found = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) - step / 2
    found[1, 2] = torch.nan
    return AdvantageScores(LAYERS, found)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    writer = AdvantageWriter(tmp_path, pytest.fail)
    for step in (1, 2, 3):
        writer.write(step, scores(step))
    writer.close()
    return tmp_path


def test_scores_are_read_back(written: Path) -> None:
    found = read_advantages(written)
    assert (found.steps.tolist(), found.layers.tolist()) == ([1, 2, 3], [1, 3])
    expected = np.stack([scores(step).scores.numpy() for step in (1, 2, 3)])
    np.testing.assert_array_equal(found.scores, expected.astype(np.float32))
    table = pq.read_table(written / FOLDER_NAME)
    assert table.column_names == ["step", "layer", "expert", "score"]
    assert table.num_rows == 18


def test_a_run_that_goes_on_has_each_step_once(written: Path) -> None:
    rewind_run_folder(written, 2)
    writer = AdvantageWriter(written, pytest.fail)
    writer.write(3, scores(7))
    writer.close()
    found = read_advantages(written)
    assert found.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(found.scores[2], scores(7).scores.numpy().astype(np.float32))


def test_the_page_has_single_steps_and_all_of_them_together() -> None:
    values = np.array([[[1.0, np.nan, np.nan]], [[2.0, -3.0, np.nan]]], dtype=np.float32)
    pool = ArrayPool("arrays")
    view = advantage_view(AdvantageHistory(np.array([1, 2]), np.array([5]), values), pool)
    assert view is not None
    assert (view["layers"], view["num_experts"], view["num_steps"]) == ([5], 3, 2)
    blobs = {"arrays": pool.encoded()}
    np.testing.assert_array_equal(unpacked(view["of_steps"], blobs), values)
    # 3 over the root of 2 steps; of the second expert there is one step.
    np.testing.assert_allclose(unpacked(view["of_all"], blobs), [[3 / 2**0.5, -3.0, np.nan]], rtol=1e-6)


def test_the_page_has_no_card_where_there_is_no_score() -> None:
    nothing = np.full((2, 1, 3), np.nan, dtype=np.float32)
    assert advantage_view(AdvantageHistory(np.array([1, 2]), np.array([5]), nothing), ArrayPool("arrays")) is None

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Image tokens and text tokens in a page: cells, layers and charts are those of the load files; text runs have none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.routing.metrics.modalities import modality_separation, specialization
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.report.arrays import ArrayPool
from nemo_rl_moe.runs.report.charts import SECTIONS, charts_of
from nemo_rl_moe.runs.report.load_view import modality_view
from nemo_rl_moe.runs.report.page_data import page_data
from tests.support.made_runs import make_run, random_counts
from tests.unit.runs.report.packed_arrays import unpacked

# Layer 2 parts the kinds wholly on its first two experts, layer 5 not at all; nobody goes to its last expert.
COUNTS = np.array([[[40, 60, 0], [50, 50, 0]]])
IMAGES = np.array([[[40, 0, 0], [20, 20, 0]]])
METRICS = {"train/moe/image/token_share": 0.4, "train/moe/modality_separation_mean": 0.5}


def shown(folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    data = page_data([read_run(make_run(folder, {1: METRICS}, **options))], 10**6)
    document: dict[str, Any] = json.loads(data.text)
    return document, dict(data.blobs)


def test_cells_layers_and_table_by_hand(tmp_path: Path) -> None:
    steps = np.concatenate([COUNTS, COUNTS, COUNTS[:, ::-1]])
    images = np.concatenate([IMAGES, 0 * IMAGES, IMAGES[:, ::-1]])  # no image at step 2
    document, blobs = shown(
        tmp_path / "run", counts=steps, image_counts=images, layers=[2, 5], in_force={"moe_router_topk": 1}
    )
    view = document["runs"][0]["modalities"]
    assert (view["layers"], view["num_experts"], view["num_steps"]) == ([2, 5], 3, 2)
    np.testing.assert_array_equal(unpacked(view["steps"], blobs), [1, 3])
    np.testing.assert_array_equal(unpacked(view["counts"], blobs), steps[[0, 2]])
    np.testing.assert_array_equal(unpacked(view["image_counts"], blobs), images[[0, 2]])
    parted, alike = [1, -1, np.nan], [0, 0, np.nan]
    np.testing.assert_array_equal(unpacked(view["specialization"], blobs), [[parted, alike], [alike, parted]])
    np.testing.assert_array_equal(unpacked(view["by_layer"]["separation"], blobs), [[1, 0], [0, 1]])
    # Of three experts, image tokens of layer 5 are all on the first: 3 times its share; text of layer 2 even on two.
    assert view["table"] == {
        "title": "Image and text, layer by layer",
        "step": 3,
        "columns": ["separation", "overlap", "busiest, image", "busiest, text"],
        "rows": [[2, "0.000", "1.000", "0.500", "0.500"], [5, "1.000", "0.000", "2.000", "2.000"]],
    }
    heading = SECTIONS["modalities"].heading
    assert document["modality_section"] == heading
    assert [chart["section"] for chart in document["charts"]] == [heading] * 2


def test_a_run_of_text_has_neither_cards_nor_charts(tmp_path: Path) -> None:
    counts = random_counts(3, 2, 4, 50)
    document = json.loads(
        page_data([read_run(make_run(tmp_path / "run", {1: {"train/moe/cv_mean": 1.0}}, counts))], 10**6).text
    )
    assert document["runs"][0]["modalities"] is None
    assert SECTIONS["modalities"].heading not in {chart["section"] for chart in document["charts"]}
    # No chart of the section is about tokens of all kinds, which any run has.
    keys = [pattern for chart in SECTIONS["modalities"].charts for pattern in chart.lines]
    assert all("/image/" in key or "/text/" in key or "/modality_" in key for key in keys)
    assert len(charts_of(keys)) == len(SECTIONS["modalities"].charts)


@pytest.mark.parametrize("images", [0 * IMAGES, COUNTS], ids=["no image", "no text"])
def test_steps_of_one_kind_leave_nothing_to_compare(tmp_path: Path, images: np.ndarray) -> None:
    document, _ = shown(tmp_path / "run", counts=COUNTS, image_counts=images)
    assert document["runs"][0]["modalities"] == {"num_steps": 0}


def test_a_long_run_of_a_large_model_keeps_few_steps_and_all_peaks() -> None:
    counts = random_counts(150, 40, 32, 60)
    images = counts // 2
    images[77, 3] = np.where(np.arange(32) < 16, counts[77, 3], 0)  # a spike of the separation
    load = ExpertLoadHistory(np.arange(1, 151), np.arange(40), counts, images)
    pool = ArrayPool("arrays")
    view = modality_view(load, 2, pool, detail=0.1)
    assert view is not None
    blobs = {"arrays": pool.encoded()}
    frames = unpacked(view["steps"], blobs)
    assert frames.tolist() == [38, 75, 113, 150], "0.1 of 60,000 cells are four steps of 1,280"
    np.testing.assert_allclose(
        unpacked(view["specialization"], blobs), specialization(counts, images, 2)[frames - 1], atol=6e-4
    )
    separation, found = modality_separation(counts, images, 2), unpacked(view["by_layer"]["separation"], blobs)
    assert (view["by_layer"]["steps_of_a_column"], len(found)) == (5, 30)
    np.testing.assert_allclose(found, separation.reshape(30, 5, 40).max(1), rtol=1e-6)
    assert found[15, 3] == separation.max() > 0.9

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routing in a page's data, compared with numbers worked out by hand."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.runs.folder.run_data import Series, read_run
from nemo_rl_moe.runs.report.charts import charts_of
from nemo_rl_moe.runs.report.page_data import page_data
from nemo_rl_moe.runs.report.routing_view import layer_tables
from tests.support.made_runs import make_run, routing_report
from tests.unit.runs.report.packed_arrays import unpacked

# 39 rows in each of two layers; in the third step, 9 of the second layer are missing and 3 hold expert 0 alone.
CAPTURES = {
    1: routing_report([0, 3], layers=[1, 3]),
    2: routing_report([0, 13], layers=[1, 3], margins=(0.02, 0.5)),
    3: routing_report([3, 0], layers=[1, 3], missing=[0, 9], zero=[0, 3]),
}


def loss_of(steps: Iterable[int]) -> dict[int, dict[str, float]]:
    return {step: {"train/loss": 1.0} for step in steps}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[str, str]]:  # type: ignore[type-arg]
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", loss_of(CAPTURES), captures=CAPTURES)
    data = page_data([read_run(folder)], 10**6)
    return json.loads(data.text), dict(data.blobs)


def test_disagreement_by_layer_and_step(document) -> None:  # type: ignore[no-untyped-def]
    (run,), blobs = document[0]["runs"], document[1]
    by_layer = run["routing"]["by_layer"]
    assert run["routing"]["layers"] == [1, 3]
    assert unpacked(by_layer["steps"], blobs).tolist() == [1, 2, 3]
    np.testing.assert_allclose(
        unpacked(by_layer["differing"], blobs), [[0, 3 / 39], [0, 13 / 39], [3 / 39, 0]], rtol=1e-6
    )


def test_rows_by_router_margin_of_a_step_and_of_all(document) -> None:  # type: ignore[no-untyped-def]
    (run,), blobs = document[0]["runs"], document[1]
    margins = run["routing"]["margins"]
    assert margins["classes"][:2] == ["≤ 0.001", "≤ 0.003"]
    assert margins["classes"][-1] == "> 1"
    of_steps = unpacked(margins["of_steps"], blobs)
    assert of_steps.shape == (3, 8, 2)
    assert of_steps[1, [3, 6]].tolist() == [[13, 13], [65, 0]]
    assert margins["of_all"] == of_steps.astype(int).sum(0).tolist()


def test_the_statistics_names_layers_with_wrong_rows(document) -> None:  # type: ignore[no-untyped-def]
    statistics = document[0]["runs"][0]["routing"]["statistics"]
    assert (statistics["num_steps"], statistics["expected"]) == (3, 3 * 78)
    kinds = {kind["label"]: kind for kind in statistics["kinds"]}
    missing = kinds["missing"]
    assert (missing["rows"], missing["num_steps"], missing["first_step"], missing["worst_step"]) == (9, 1, 3, 3)
    assert missing["worst_share"] == pytest.approx(9 / 78)
    assert missing["share"] == pytest.approx(9 / 234)
    assert kinds["usable"]["rows"] == 234 - 12
    assert (kinds["an expert twice"]["rows"], kinds["an expert twice"]["first_step"]) == (0, None)
    assert statistics["columns"] == ["missing", "expert 0 alone"]
    assert statistics["layers"] == [[3, 117, 9, 3]]


def test_long_runs_show_the_worst_of_each_stretch(tmp_path: Path) -> None:
    captures = {step: routing_report([13 * (step == 500), 0]) for step in (*range(1, 40), 500, *range(501, 540))}
    folder = make_run(tmp_path / "run", loss_of(captures), captures=captures)
    data = page_data([read_run(folder)], 3_000)
    routing = json.loads(data.text)["runs"][0]["routing"]
    differing = unpacked(routing["by_layer"]["differing"], dict(data.blobs))
    assert len(differing) < len(captures)
    assert differing.max() == pytest.approx(13 / 39)


def test_a_layer_that_no_step_knows_is_a_gap(tmp_path: Path) -> None:
    captures = {1: routing_report([0, 0], missing=[0, 39])}
    data = page_data([read_run(make_run(tmp_path / "run", {1: {"train/loss": 1.0}}, captures=captures))], 10**6)
    routing = json.loads(data.text)["runs"][0]["routing"]
    differing = unpacked(routing["by_layer"]["differing"], dict(data.blobs))
    np.testing.assert_array_equal(differing, [[0, np.nan]])


def test_parts_of_the_mismatch_stand_in_the_order_of_their_sum() -> None:
    parts = ("numerics", "routing", "staleness", "total")
    (chart,) = charts_of(f"train/moe/routing_split_end/kl_{part}" for part in parts)
    assert [line["label"] for line in chart["lines"]] == ["total", "routing", "numerics", "staleness"]
    assert chart["bars"]


def test_what_is_measured_of_single_layers_is_a_table_and_no_line() -> None:
    keys = [f"train/moe/router_gradient/norm_{part}{layer}" for part in ("policy", "aux") for layer in ("", "_layer_0")]
    (chart,) = charts_of(keys)
    assert [line["label"] for line in chart["lines"]] == ["aux", "policy"]
    steps, later = np.array([3, 6]), np.array([3])
    metrics = {
        "train/moe/router_gradient/norm_policy_layer_2": Series(steps, np.array([1.0, 0.12345])),
        "train/moe/router_gradient/norm_policy_layer_10": Series(steps, np.array([1.0, np.nan])),
        "train/moe/router_gradient/cosine_policy_aux_layer_2": Series(later, np.array([-0.5])),
        "train/moe/routing/live_agreement_layer_2": Series(steps, np.array([1.0, 1.0])),
        "train/moe/router_gradient/norm_policy": Series(steps, np.array([1.0, 1.0])),
    }
    (table,) = layer_tables(metrics)
    assert (table["step"], table["columns"]) == (6, ["norm_policy", "cosine_policy_aux"])
    assert table["rows"] == [[2, "0.1235", None], [10, "nan", None]]

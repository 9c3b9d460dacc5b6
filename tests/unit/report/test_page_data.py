# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.report.page_data import PageData, page_data
from nemo_rl_moe.report.run_data import RunData, Series, read_run
from tests.unit.report.made_runs import make_run, random_counts
from tests.unit.report.packed_arrays import unpacked


def document_of(data: PageData) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(data.text)
    return document


def size_of(data: PageData) -> int:
    return len(data.text) + sum(map(len, data.blobs.values()))


def test_all_counts_of_a_short_run_are_exact(tmp_path: Path) -> None:
    counts = random_counts(7, 2, 8, 300)
    data = page_data([read_run(make_run(tmp_path / "run", {}, counts, layers=[1, 3]))], 10**6)
    (run,) = document_of(data)["runs"]
    assert (run["load"]["layers"], run["load"]["num_experts"], run["load"]["num_steps"]) == ([1, 3], 8, 7)
    blobs = dict(data.blobs)
    np.testing.assert_array_equal(unpacked(run["load"]["frames"]["steps"], blobs), range(1, 8))
    np.testing.assert_array_equal(unpacked(run["load"]["frames"]["counts"], blobs), counts)


@pytest.mark.parametrize(("num_runs", "budget"), [(1, 45_000), (3, 150_000)])
def test_a_long_run_shows_what_the_budget_allows_for(tmp_path: Path, num_runs: int, budget: int) -> None:
    counts = random_counts(200, 8, 64, 50)
    folders = [make_run(tmp_path / str(number), {}, counts) for number in range(num_runs)]
    data = page_data([read_run(folder) for folder in folders], budget)
    blobs = dict(data.blobs)
    # Filled, but for what differs from step to step.
    assert 0.8 * budget < size_of(data) <= budget
    for run in document_of(data)["runs"]:
        steps = unpacked(run["load"]["frames"]["steps"], blobs)
        assert 5 < len(steps) < 200
        assert steps[-1] == 200
        assert np.ptp(np.diff(steps)) <= 1
        np.testing.assert_array_equal(unpacked(run["load"]["frames"]["counts"], blobs), counts[steps - 1])


def test_a_long_run_has_what_a_short_one_leaves(tmp_path: Path) -> None:
    long, short = random_counts(200, 8, 64, 50), random_counts(3, 2, 4, 50)
    runs = [
        read_run(make_run(tmp_path / str(number), {}, counts)) for number, counts in enumerate([long, short, short])
    ]
    shown = []
    for some in (runs, runs[:1]):
        data = page_data(some, 60_000)
        assert size_of(data) <= 60_000
        shown.append(document_of(data)["runs"][0]["load"]["frames"]["steps"]["shape"][0])
    assert shown[1] > shown[0] > 0.7 * shown[1]


def test_the_last_step_is_shown_however_small_the_budget_is(tmp_path: Path) -> None:
    counts = random_counts(20, 2, 64, 50)
    data = page_data([read_run(make_run(tmp_path / "run", {}, counts))], 10)
    frames = document_of(data)["runs"][0]["load"]["frames"]
    np.testing.assert_array_equal(unpacked(frames["counts"], dict(data.blobs)), counts[-1:])


def test_metrics_of_charts_keep_more_points_than_others() -> None:
    steps = np.arange(1, 5001)
    noise = np.random.default_rng(0).standard_normal((400, 5000))
    metrics = {f"train/other_{number}": Series(steps, values) for number, values in enumerate(noise[1:])}
    run = RunData(Path("run"), metrics | {"train/loss": Series(steps, noise[0])}, None)
    data = page_data([run], 2_000_000)
    assert size_of(data) < 2_000_000
    (of_run,) = document_of(data)["runs"]
    loss, other = of_run["metrics"]["train/loss"], of_run["metrics"]["train/other_3"]
    assert loss["number"] == other["number"] == 5000
    assert 50 < other["values"]["shape"][0] < loss["values"]["shape"][0] <= 2000
    values = unpacked(loss["values"], dict(data.blobs))
    assert (values.min(), values.max()) == (np.float32(noise[0].min()), np.float32(noise[0].max()))


def test_numbers_that_are_none_are_told_as_such(tmp_path: Path) -> None:
    values = {1: math.nan, 2: math.inf, 3: -math.inf, 4: 1e300, 5: 0.5}
    folder = make_run(tmp_path / "run", {step: {"train/loss": value} for step, value in values.items()})
    data = page_data([read_run(folder)], 10**6)
    (run,) = document_of(data)["runs"]
    found = unpacked(run["metrics"]["train/loss"]["values"], dict(data.blobs))
    np.testing.assert_array_equal(found, np.array([np.nan, np.inf, -np.inf, np.inf, 0.5], dtype=np.float32))


def test_what_is_drawn_of_the_loads_is_right(tmp_path: Path) -> None:
    counts = np.tile(np.array([[[6, 2, 0, 0], [2, 2, 2, 2]]]), (20, 1, 1))
    counts[:, :, :] *= 100
    folder = make_run(tmp_path / "run", {}, counts, layers=[2, 5])
    data = page_data([read_run(folder)], 10**6)
    blobs = dict(data.blobs)
    load = document_of(data)["runs"][0]["load"]
    # cv = sqrt((2^2 + 0 + 1 + 1) / 3) = sqrt(2), by chance sqrt(0.5 * 4 / 800) = 0.05.
    spread = unpacked(load["by_layer"]["spread"], blobs)
    np.testing.assert_allclose(spread, np.tile([math.sqrt(2 - 0.0025), 0], (20, 1)), rtol=1e-6)
    np.testing.assert_array_equal(unpacked(load["by_layer"]["dead"], blobs), np.tile([2, 0], (20, 1)))
    sizes = {entry["size"]: entry for entry in load["what_if"]["sizes"]}
    assert sizes.keys() == {2, 4}
    np.testing.assert_allclose(unpacked(sizes[2]["values"], blobs), np.full(20, 1.5))  # of 2 and 1
    assert (sizes[4]["late_mean"], sizes[4]["late_worst_layer"], sizes[4]["late_worst_layer_index"]) == (2.0, 3.0, 2)
    most = [(one["layer"], one["expert"]) for one in load["outliers"]["experts"] if one["which"] == "most"]
    least = [(one["layer"], one["expert"]) for one in load["outliers"]["experts"] if one["which"] == "least"]
    assert most[0] == (2, 0)
    assert set(least[:2]) == {(2, 2), (2, 3)}
    assert len(most) == len(least) == 4
    np.testing.assert_allclose(unpacked(load["outliers"]["experts"][0]["values"], blobs), np.full(20, 3.0))


def test_names_of_runs_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / number / "logs" / "exp_001", {1: {"train/loss": 1.0}}) for number in "ab"]
    document = document_of(page_data([read_run(folder) for folder in [*folders, folders[0]]], 10**6))
    assert [run["name"] for run in document["runs"]] == ["a/logs/exp_001 (1)", "b/logs/exp_001", "a/logs/exp_001 (2)"]
    assert [chart["title"] for chart in document["charts"]] == ["Loss"]


def test_settings_that_differ_are_marked(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", {}, config={"sft": {"seed": 1}, "policy": {"name": "x", "sizes": []}})
    second = make_run(tmp_path / "b", {}, config={"sft": {"seed": 2}, "policy": {"name": "x"}})
    rows = document_of(page_data([read_run(first), read_run(second)], 10**6))["configuration"]
    assert {row["key"]: (row["values"], row["differ"]) for row in rows} == {
        "policy.name": (["x", "x"], False),
        "policy.sizes": (["[]", None], True),
        "sft.seed": (["1", "2"], True),
        "in force: moe_router_topk": (["2", "2"], False),
    }

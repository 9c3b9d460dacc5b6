# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.folder.run_data import RunData, Series, read_run
from nemo_rl_moe.runs.report import load_view
from nemo_rl_moe.runs.report.page_data import PageData, _frames, page_data
from tests.support.made_runs import make_run, random_counts
from tests.unit.runs.report.packed_arrays import unpacked


def document_of(data: PageData) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(data.text)
    return document


def size_of(data: PageData) -> int:
    return len(data.text.encode()) + sum(map(len, data.blobs.values()))


def test_all_counts_of_a_short_run_are_exact(tmp_path: Path) -> None:
    counts = random_counts(7, 2, 8, 300)
    data = page_data([read_run(make_run(tmp_path / "run", {}, counts, layers=[1, 3]))], 10**6)
    (run,) = document_of(data)["runs"]
    assert (run["load"]["layers"], run["load"]["num_experts"], run["load"]["num_steps"]) == ([1, 3], 8, 7)
    blobs = dict(data.blobs)
    np.testing.assert_array_equal(unpacked(run["load"]["frames"]["steps"], blobs), range(1, 8))
    np.testing.assert_array_equal(unpacked(run["load"]["frames"]["counts"], blobs), counts)


@pytest.mark.parametrize(("num_runs", "budget"), [(1, 45_000), pytest.param(3, 150_000, marks=pytest.mark.full)])
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


def test_numbers_that_are_none_are_reported_as_such(tmp_path: Path) -> None:
    values = {1: math.nan, 2: math.inf, 3: -math.inf, 4: 1e300, 5: 0.5}
    folder = make_run(tmp_path / "run", {step: {"train/loss": value} for step, value in values.items()})
    data = page_data([read_run(folder)], 10**6)
    (run,) = document_of(data)["runs"]
    found = unpacked(run["metrics"]["train/loss"]["values"], dict(data.blobs))
    # 1e300 is beyond 4 bytes, but not infinite.
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf, 1e300, 0.5])


@pytest.mark.full
def test_many_runs_share_what_there_is_for_their_layers_over_time(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", {}, random_counts(200, 60, 4, 50)))
    columns = []
    for num_runs in (1, 12):
        # A matrix of the second run is no copy of the first one's.
        assert run.expert_load is not None
        rolled = [
            replace(run, expert_load=replace(run.expert_load, counts=np.roll(run.expert_load.counts, number, axis=0)))
            for number in range(num_runs)
        ]
        data = page_data(rolled, 200_000)
        assert size_of(data) <= 200_000
        columns.append(document_of(data)["runs"][-1]["load"]["by_layer"]["steps"]["shape"][0])
    assert columns[0] == 200
    assert 10 <= columns[1] < 60


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


def test_names_of_runs_are_distinguished(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("share", range(5, 100, 6))
def test_a_run_whose_steps_need_unlike_space_ends_and_fits(share: int) -> None:
    generator = np.random.default_rng(0)
    counts = generator.poisson(40, (100, 4, 64))
    counts[::5] = generator.poisson(4000, (20, 4, 64))
    load = ExpertLoadHistory(np.arange(1, 101), np.arange(4), counts)
    frames, blob = _frames(load, whole := 400 * share, "counts")
    assert len(blob) <= whole
    steps = unpacked(frames["steps"], {"counts": blob})
    assert steps[-1] == 100
    np.testing.assert_array_equal(unpacked(frames["counts"], {"counts": blob}), counts[steps - 1])


@pytest.mark.parametrize("text", ["\u6f22\u5b57" * 1000, "<&>" * 600, "plain " * 300])
def test_samples_are_cut_to_what_the_budget_allows_for(tmp_path: Path, text: str) -> None:
    samples = [
        {"step": 1 + number // 6, "split": "val", "sample_id": str(number), "prompt": text, "response": text}
        for number in range(24)
    ]
    run = read_run(make_run(tmp_path / "run", {}, samples=samples))
    for budget in (4_000_000, 50_000):
        data = page_data([run], budget)
        assert size_of(data) <= budget
        (described,) = document_of(data)["runs"]
        assert len(described["samples"]) == 24
        assert (described["samples"][0]["prompt"] == text) is (budget == 4_000_000)
        assert described["samples"][0]["prompt"][:30] == text[:30]


def test_letters_take_the_bytes_that_they_have_and_halves_of_letters_none_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    sample = {"step": 1, "split": "val", "sample_id": "a", "prompt": "\u6f22", "response": "\ud800"}
    text = page_data([read_run(make_run(tmp_path / "run", {}, samples=[sample]))], 10**6).text
    assert "\u6f22" in text
    assert json.loads(text.encode())["runs"][0]["samples"][0]["response"] == "?"


def test_other_layouts_are_those_of_the_last_tenth_and_of_evenly_spaced_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At step s of 40 rank 0 of 2 gets s + 40 of 80 assignments of the one layer, and half of the other's.
    counts = np.array([[[step + 40, 0, 40 - step, 0], [20, 20, 20, 20]] for step in range(1, 41)])
    monkeypatch.setattr(load_view, "_FEWEST", 1)
    monkeypatch.setattr(load_view, "_MOST_POINTS", 4)
    monkeypatch.setattr(load_view, "_MOST_COLUMNS", 6)
    data = page_data([read_run(make_run(tmp_path / "run", {}, counts))], 10**6)
    blobs = dict(data.blobs)
    load = document_of(data)["runs"][0]["load"]
    (halves, _) = load["what_if"]["sizes"]
    assert halves["size"] == 2
    np.testing.assert_array_equal(unpacked(load["what_if"]["steps"], blobs), [10, 20, 30, 40])
    # The busier of two ranks: (40 + s) / 40, and 1; of the steps 37 to 40 the mean is 38.5.
    np.testing.assert_allclose(unpacked(halves["values"], blobs), [1 + step / 80 for step in (10, 20, 30, 40)])
    assert halves["late_worst_layer"] == pytest.approx(1 + 38.5 / 40)
    assert halves["late_mean"] == pytest.approx(1 + 38.5 / 80)
    assert halves["late_worst_layer_index"] == 0
    # 40 steps in 6 columns: up to 7 in one.
    assert load["by_layer"]["steps_of_a_column"] == 7
    np.testing.assert_array_equal(unpacked(load["by_layer"]["steps"], blobs), [7, 14, 20, 27, 34, 40])

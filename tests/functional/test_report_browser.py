# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports of real runs, opened in a real browser."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nemo_rl_moe import cli
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.row_kinds import Row
from nemo_rl_moe.routing.metrics.load_arrays import utilization
from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores
from nemo_rl_moe.runs.folder.advantages import read_advantages
from nemo_rl_moe.runs.folder.expert_load import read_expert_load
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, read_metrics
from nemo_rl_moe.runs.folder.routing import read_routing
from tests.functional import sft_runs
from tests.functional.browser import OpenPage, open_page
from tests.support.loggers import read_jsonl
from tests.support.made_runs import make_run, routing_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, BATCH_SIZE = 30, 32
ROUTING_METRICS = {
    "train/loss": 1.0,
    "train/gen_kl_error": 1e-5,
    **{f"train/moe/routing_split/mean_abs_{part}": 0.1 for part in ("total", "routing", "numerics")},
    "train/moe/router_gradient/norm_policy_layer_1": 0.5,
    "train/moe/router_gradient/cosine_policy_aux_layer_1": -0.25,
}
OVERLOAD = '[data-chart="Overload of the busiest rank"]'
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b>%{x}</b>"


@pytest.fixture(scope="module")
def runs(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs on two expert-parallel ranks: routers free, and all tokens sent to one rank."""
    folder = tmp_path_factory.mktemp("runs")
    data = sft_runs.make_additions(folder / "data", NUM_STEPS * BATCH_SIZE, BATCH_SIZE)
    found = {}
    for name, hot_rank in (("healthy", None), ("forced", 1)):
        overrides = sft_runs.settings(
            folder / name,
            data,
            sft_runs.MODEL,
            sft__max_num_steps=NUM_STEPS,
            sft__val_period=10,
            policy__train_global_batch_size=BATCH_SIZE,
            policy__train_micro_batch_size=16,
            policy__megatron_cfg__expert_model_parallel_size=2,
            policy__megatron_cfg__moe_router_force_hot_rank=hot_rank,
            policy__megatron_cfg__scheduler__lr_warmup_iters=5,
            checkpointing__enabled=False,
            **sft_runs.only_jsonl(),
        )
        (folder / name).mkdir()
        sft_runs.run_command(sft_runs.sft_command(overrides), folder)
        found[name] = sft_runs.only_run_folder(folder / name)
    return found


@pytest.fixture(scope="module")
def comparison(runs: dict[str, Path], browser: Any, tmp_path_factory: pytest.TempPathFactory) -> OpenPage:
    """The page about both runs."""
    output = tmp_path_factory.mktemp("report") / "comparison.html"
    assert cli.main(["report", str(runs["healthy"]), str(runs["forced"]), "--output", str(output)]) == 0
    return open_page(browser, output)


def step_label(page: Any) -> int:
    return int(page.locator(".controls strong").inner_text().removeprefix("step "))


def slide(page: Any, key: str) -> None:
    slider = page.locator('input[type="range"]')
    slider.focus()
    slider.press(key)


def expected_cells(run: Path, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and utilization as the Parquet files have them."""
    load = read_expert_load(run)
    of_step = load.counts[load.steps.tolist().index(step)]
    return of_step, utilization(of_step)


def test_findings_distinguish_the_runs(comparison: OpenPage) -> None:
    cards = comparison.page.locator("[data-run]")
    assert cards.nth(0).locator(".findings li").all_inner_texts() == ["No findings."]
    reported = cards.nth(1).locator(".findings li").all_inner_texts()
    assert reported[0].startswith("forced routing: moe_router_force_hot_rank is 1")
    assert "layer 2: 4 of 8 experts dead since step 1; beyond sampling noise" in reported
    assert any(text.startswith("the busiest expert-parallel rank has 2.00 times the work") for text in reported)


@pytest.mark.parametrize(("key", "step"), [("Home", 1), ("ArrowRight", 2), ("End", NUM_STEPS)])
def test_cells_are_those_of_the_load_files(comparison: OpenPage, runs: dict[str, Path], key: str, step: int) -> None:
    slide(comparison.page, key)
    comparison.page.wait_for_function(
        f"() => document.querySelector('[data-heatmap]').previousSibling.textContent.startsWith('step {step}:')"
    )
    assert step_label(comparison.page) == step
    for number, run in enumerate(runs.values()):
        cells, dead = comparison.plot(f'[data-heatmap="{number}"]')
        counts, shares = expected_cells(run, step)
        np.testing.assert_array_equal(np.array(cells["customdata"])[..., 0], counts)
        np.testing.assert_allclose(np.array(cells["z"]), shares, rtol=1e-12)
        is_dead = np.array([[cell == 1 for cell in row] for row in dead["z"]])
        np.testing.assert_array_equal(is_dead, counts == 0)
    assert (expected_cells(runs["forced"], step)[0][:, :4] == 0).all(), "or no dead expert was looked at"


def test_hovering_reports_the_exact_count(comparison: OpenPage, runs: dict[str, Path]) -> None:
    slide(comparison.page, "End")
    counts, shares = expected_cells(runs["forced"], NUM_STEPS)
    area = comparison.page.locator('[data-heatmap="1"] .nsewdrag')
    area.scroll_into_view_if_needed()
    for layer, expert in ((0, 4), (3, 7), (2, 1)):
        box = area.bounding_box()
        x = box["x"] + box["width"] * (expert + 0.5) / counts.shape[1]
        y = box["y"] + box["height"] * (layer + 0.5) / counts.shape[0]
        comparison.page.mouse.move(x, y)
        said = (
            f"layer {layer}, expert {expert}{counts[layer, expert]} assignmentsutilization {shares[layer, expert]:.3f}"
        )
        comparison.page.wait_for_function(
            "(said) => document.querySelector('[data-heatmap=\"1\"] .hoverlayer').textContent === said", arg=said
        )


def test_playing_goes_from_step_to_step_to_the_end(comparison: OpenPage) -> None:
    page = comparison.page
    slide(page, "Home")
    button = page.locator(".controls button")
    button.click()
    page.wait_for_function("() => document.querySelector('.controls strong').textContent === 'step 4'")
    button.click()  # pauses
    paused = step_label(page)
    page.wait_for_timeout(800)
    assert (step_label(page), button.inner_text()) == (paused, "Play")
    button.click()
    page.wait_for_function(f"() => document.querySelector('.controls strong').textContent === 'step {NUM_STEPS}'")
    page.wait_for_function("() => document.querySelector('.controls button').textContent === 'Play'")


def test_sorting_puts_the_most_loaded_expert_first(comparison: OpenPage, runs: dict[str, Path]) -> None:
    slide(comparison.page, "End")
    box = comparison.page.locator('.controls input[type="checkbox"]')
    box.check()
    comparison.page.wait_for_function(
        "() => document.querySelector('[data-heatmap]').layout.xaxis.title.text !== 'expert'"
    )
    counts, _ = expected_cells(runs["healthy"], NUM_STEPS)
    found = np.array(comparison.plot('[data-heatmap="0"]')[0]["customdata"])
    box.uncheck()
    np.testing.assert_array_equal(found[..., 0], -np.sort(-counts, axis=1))
    np.testing.assert_array_equal(np.take_along_axis(counts, found[..., 1], 1), found[..., 0])


def test_metrics_of_both_runs_lie_over_each_other(comparison: OpenPage, runs: dict[str, Path]) -> None:
    traces = {trace["name"]: trace for trace in comparison.plot('[data-chart="Spread of the expert loads (cv)"]')}
    for label, run in runs.items():
        history = read_jsonl(run / "metrics.jsonl")["train/moe/cv_mean"]
        (trace,) = (trace for name, trace in traces.items() if name == f"{label}/logs/exp_001 · cv")
        assert trace["x"] == [step for step, _ in history]
        np.testing.assert_allclose(trace["y"], [value for _, value in history], rtol=1e-6)
    colors = {trace["line"]["color"] for name, trace in traces.items() if name.endswith("· cv")}
    assert len(colors) == 2


def test_a_range_of_steps_holds_for_all_charts(comparison: OpenPage) -> None:
    comparison.page.evaluate(
        "Plotly.relayout(document.querySelector('[data-chart=\"Loss\"]'), {'xaxis.range[0]': 5, 'xaxis.range[1]': 9})"
    )
    other = "document.querySelector('[data-chart=\"what-if\"]').layout.xaxis"
    comparison.page.wait_for_function(f"() => {other}.range && {other}.range[0] === 5 && {other}.range[1] === 9")
    comparison.page.evaluate(
        "Plotly.relayout(document.querySelector('[data-chart=\"Loss\"]'), {'xaxis.autorange': true})"
    )
    comparison.page.wait_for_function(f"() => {other}.autorange === true")


def test_charts_can_be_over_minutes(comparison: OpenPage, runs: dict[str, Path]) -> None:
    choice = comparison.page.get_by_label("horizontal axis")
    choice.select_option("minutes")
    comparison.page.wait_for_function(
        f"""document.querySelector('{OVERLOAD}').layout.xaxis.title.text === "minutes" """
    )
    records = read_metrics(next(iter(runs.values())) / METRICS_FILE_NAME)
    times = [
        (record.time - records[0].time) / 60 for record in records if "train/moe/avg_overload_factor" in record.metrics
    ]
    traces = [trace for trace in comparison.plot(OVERLOAD) if trace.get("hoverinfo") != "skip"]
    assert traces[0]["x"] == pytest.approx(times, rel=1e-6, abs=1e-6)
    choice.select_option("step")
    comparison.page.wait_for_function(f"""document.querySelector('{OVERLOAD}').layout.xaxis.title.text === "step" """)


def test_a_screen_reader_gets_the_ends_of_each_line(comparison: OpenPage) -> None:
    spoken = comparison.page.locator(OVERLOAD).get_attribute("aria-label")
    assert re.match(r"Overload of the busiest rank: .* [\d.]+ at step 1, [\d.]+ at step \d+", spoken)
    silent = comparison.page.locator('.plot:not([role="img"][aria-label])').count()
    assert silent == 0


def test_the_setting_that_differs_is_reported(comparison: OpenPage) -> None:
    differing = comparison.page.locator("section", has=comparison.page.locator("h3", has_text="What differs"))
    rows = [row.inner_text().split("\t") for row in differing.locator("tbody tr").all()]
    assert ["policy.megatron_cfg.moe_router_force_hot_rank", "null", "1"] in rows
    assert ["in force: moe_router_force_hot_rank", "—", "1"] in rows


def test_it_is_drawn_anew_for_the_dark(comparison: OpenPage) -> None:
    before = comparison.plot('[data-heatmap="0"]')[0]["colorscale"]
    comparison.page.emulate_media(color_scheme="dark")
    comparison.page.wait_for_function(
        "(before) => JSON.stringify(document.querySelector('[data-heatmap]').data[0].colorscale) !== before",
        arg=json.dumps(before, separators=(",", ":")),
    )
    comparison.page.emulate_media(color_scheme="light")


def test_nothing_has_left_the_file_and_nothing_has_failed(comparison: OpenPage) -> None:
    assert comparison.requests == []
    assert comparison.problems == []


@pytest.fixture(scope="module")
def routing(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenPage, dict[str, Path]]:
    """The page about two runs with captures, of which one is wrong in a step, and a run without."""
    folder = tmp_path_factory.mktemp("routing")
    wrong = RoutingAnomaly("layer", "layer 3 carries layer 2's routes", 3)
    found = {}
    for name, differing in (("none", 3), ("sick", 9)):
        captures = {step: routing_report([0, step], layers=[1, 3], replays=name == "sick") for step in range(1, 6)}
        captures[6] = routing_report(
            [0, differing], layers=[1, 3], zero=[0, differing], anomalies=[wrong] * (name == "sick")
        )
        scores = {step: AdvantageScores((1, 3), _scores(step, differing)) for step in captures}
        found[name] = make_run(
            folder / name, dict.fromkeys(captures, ROUTING_METRICS), captures=captures, scores=scores
        )
    found["without"] = make_run(folder / "without", {1: {"train/loss": 1.0}})
    output = folder / "report.html"
    assert cli.main(["report", *map(str, found.values()), "--output", str(output)]) == 0
    return open_page(browser, output), found


def _scores(step: int, largest: float) -> torch.Tensor:
    """Scores of eight experts of two layers, of which one has none and another one keeps its side."""
    found = torch.randn(2, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    found[0, 2], found[1, 5] = torch.nan, largest
    return found


def test_experts_by_advantage_are_those_of_the_table(routing: tuple[OpenPage, dict[str, Path]]) -> None:
    opened, found = routing
    cards = opened.page.locator("section", has=opened.page.locator("h3", has_text="Experts by advantage"))
    assert cards.count() == 2
    for number, name in enumerate(("none", "sick")):
        scores = read_advantages(found[name]).scores
        place = f'[data-chart="advantages"] >> nth={number}'
        (cells,) = opened.plot(place)
        drawn = np.array(cells["z"], dtype=float)  # a gap is null
        assert cells["y"] == ["layer 1", "layer 3"]
        np.testing.assert_allclose(drawn, scores.sum(0) / np.sqrt(6), rtol=1e-5)
        assert np.isnan(drawn[0, 2])
        slider = cards.nth(number).locator('input[type="range"]')
        slider.focus()
        slider.press("Home")
        opened.page.wait_for_function(
            "([number, value]) => Math.abs(document.querySelectorAll('[data-chart=\"advantages\"]')[number]"
            ".data[0].z[0][0] - value) < 1e-6",
            arg=[number, float(scores[0, 0, 0])],
        )
        (cells,) = opened.plot(place)
        np.testing.assert_allclose(np.array(cells["z"], dtype=float), scores[0], rtol=1e-6)


def test_disagreement_is_that_of_the_table(routing: tuple[OpenPage, dict[str, Path]]) -> None:
    opened, found = routing
    for number, name in enumerate(("none", "sick")):
        (cells,) = opened.plot(f'[data-chart="rows that differ, by layer"] >> nth={number}')
        rows = read_routing(found[name]).rows
        expected = 1 - rows[..., Row.LIVE_SAME] / rows[..., Row.USABLE]
        assert (cells["x"], cells["y"]) == ([1, 2, 3, 4, 5, 6], ["layer 1", "layer 3"])
        np.testing.assert_allclose(np.array(cells["z"]), expected.T, rtol=1e-6)


def test_margins_of_a_step_and_of_all_are_those_of_the_table(routing: tuple[OpenPage, dict[str, Path]]) -> None:
    opened, found = routing
    margins = {name: read_routing(found[name]).margins.sum(1) for name in ("none", "sick")}
    for name, (bars, _) in zip(margins, _margins_of(opened), strict=True):
        assert bars["customdata"] == margins[name].sum(0).tolist()
    slider = opened.page.locator("section", has_text="by router margin").locator('input[type="range"]')
    slider.focus()
    slider.press("Home")
    opened.page.wait_for_function(
        "() => document.querySelector('[data-chart=\"margins\"]').data[0].customdata[0][0] === 1"
    )
    for name, (bars, shares) in zip(margins, _margins_of(opened), strict=True):
        assert bars["customdata"] == margins[name][0].tolist()
        np.testing.assert_allclose(shares["y"], margins[name][0, :, 0] / margins[name][0, :, 0].sum())


def _margins_of(opened: OpenPage) -> list[tuple[Any, Any]]:
    """Bars and line of each run."""
    traces = opened.plot('[data-chart="margins"]')
    return list(zip(traces[::2], traces[1::2], strict=True))


def test_the_statistics_and_the_finding_name_the_layer(routing: tuple[OpenPage, dict[str, Path]]) -> None:
    page = routing[0].page
    statistics = page.locator("section", has=page.locator("h3", has_text="Statistics of the capture"))
    assert statistics.count() == 2
    rows = [row.inner_text().split("\t") for row in statistics.nth(1).locator("tbody tr").all()]
    assert ["expert 0 alone", "9", "1.923%", "1", "6", "11.54% (step 6)"] in rows
    assert rows[-1] == ["3", "234", "9"], "of layers, the one with wrong rows"
    reported = page.locator("[data-run]").nth(1).locator(".findings li").all_inner_texts()
    assert reported == ["layer 3 carries layer 2's routes; since step 6"]


def test_what_was_measured_is_drawn_and_what_was_not_is_absent(routing: tuple[OpenPage, dict[str, Path]]) -> None:
    opened = routing[0]
    parts = opened.plot('[data-chart="Parts of the mismatch, before the updates"]')
    assert [trace["name"].split("/")[-1] for trace in parts] == [
        f"{name} · {part}" for name in ("none", "sick") for part in ("total", "routing", "numerics")
    ]
    assert all((trace["type"], trace["y"]) == ("bar", [pytest.approx(0.1)] * 6) for trace in parts)
    assert opened.page.locator('[data-chart="Parts of the mismatch, after the updates"]').count() == 0
    table = opened.page.locator("section", has_text="Gradient of the routers, layer by layer").first
    assert table.locator("tbody tr").inner_text().split("\t") == ["1", "0.5", "-0.25"]
    assert (opened.requests, opened.problems) == ([], [])


def test_the_policy_stops_what_the_page_itself_does_not_do(comparison: OpenPage) -> None:
    page = comparison.page
    assert page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'stopped')") == "stopped"
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.head.append(script);
        }"""
    )
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 2\">')")
    page.wait_for_timeout(300)
    assert page.evaluate("window.ran") is None
    assert comparison.requests == []
    comparison.problems.clear()


def test_markup_from_a_run_is_shown_and_not_run(runs: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(3)>"
    folder.mkdir()
    for name in ("metrics.jsonl", "effective_moe_configuration.json"):
        (folder / name).write_bytes((runs["healthy"] / name).read_bytes())
    (folder / "expert_load.parquet").symlink_to(runs["healthy"] / "expert_load.parquet")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines]
    for record in records:
        record["metrics"] |= {f"timing/{HOSTILE}/seconds": 1.0, HOSTILE: "NaN", "train/skipped_updates": 1.0}
    # The run still goes on: a crash has cut its last line.
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records)[:-20])
    config = yaml.safe_load((runs["healthy"] / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {HOSTILE: {"key": HOSTILE}}))
    texts = dict.fromkeys(("split", "sample_id", "prompt", "response", "fault"), HOSTILE)
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "reward": 1, **texts}) + "\n")
    output = tmp_path / "report.html"
    assert cli.main(["report", str(folder), str(runs["forced"]), "--output", str(output)]) == 0

    opened = open_page(browser, output)
    page = opened.page
    page.locator('select[aria-label="metric"]').select_option(HOSTILE)
    page.wait_for_function("() => document.querySelector('[data-chart=\"any metric\"]').data.length === 1")
    assert page.locator("h3", has_text="<img src=x onerror=alert(3)>").first.is_visible()
    # The legend of "Seconds of each phase" has the metric's name.
    legend = page.locator('[data-chart="Seconds of each phase"] .legendtext').all_text_contents()
    assert any(text.endswith(f"· {HOSTILE}") for text in legend)
    assert page.locator("pre", has_text=HOSTILE).count() == 2
    page.locator("summary", has_text="settings").click()
    assert page.locator("td", has_text=f"{HOSTILE}.key").first.is_visible()
    assert page.locator("p.notes", has_text="is NaN or infinite at step").first.is_visible()
    assert "updates have been skipped since step" in page.locator("[data-run]").first.inner_text()
    page.mouse.move(400, 1000)
    page.wait_for_timeout(300)
    assert page.locator("img, b, iframe, object, embed").count() == 0
    assert (opened.dialogs, opened.requests, opened.problems) == ([], [], [])
    page.close()

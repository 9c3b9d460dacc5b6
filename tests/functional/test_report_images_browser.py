# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports of runs with images, opened in a real browser: what is drawn is what the run's files hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.routing.metrics.modalities import modality_separation, specialization
from nemo_rl_moe.runs.folder.thumbnails import thumbnail_of
from tests.functional.browser import OpenPage, open_page
from tests.support.made_runs import TOPK, make_run, random_counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECTION = "Image and text tokens"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b>%{x}</b>"
METRICS = {
    "train/loss": 1.0,
    "train/moe/image/token_share": 0.5,
    **{f"train/moe/{kind}/max_violation_mean": value for kind, value in (("image", 0.5), ("text", 0.25))},
}
NAMES = [f"{number:016x}" for number in range(3)]


def sample(prompt: int, text: str, names: list[str]) -> dict[str, Any]:
    return {
        "step": 1,
        "split": "val",
        "sample_id": f"f:{prompt}",
        "prompt": text,
        "response": text,
        "thumbnails": names,
    }


def report_of(browser: Any, *runs: Path) -> OpenPage:
    output = runs[0].parent / "report.html"
    assert cli.main(["report", *map(str, runs), "--output", str(output)]) == 0
    return open_page(browser, output)


def headings(opened: OpenPage) -> list[str]:
    found: list[str] = opened.page.locator("h2").all_inner_texts()
    return found


def test_two_runs_with_images_beside_each_other(browser: Any, tmp_path: Path) -> None:
    made = {}
    for seed, name in enumerate("ab"):
        counts = random_counts(3, 2, 4, 50, seed=seed)
        counts[:, 1, 3] = 0
        images = np.random.default_rng(seed).binomial(counts, 0.5)
        made[name] = counts, images
        make_run(tmp_path / name, {1: METRICS}, counts, layers=[1, 4], image_counts=images)
    opened = report_of(browser, tmp_path / "a", tmp_path / "b")
    for number, (counts, images) in enumerate(made.values()):
        place = f'[data-chart="modalities"] >> nth={number}'
        (cells,) = opened.plot(place)
        leaning = specialization(counts[2], images[2], TOPK)
        drawn = np.array(cells["z"], dtype=float)
        np.testing.assert_allclose(drawn, leaning, atol=6e-4)
        assert np.isnan(drawn[1, 3])
        share = images[2, 0, 1] / counts[2, 0, 1]
        assert cells["text"][0][1] == f"{np.floor(100 * share + 0.5):.0f}%"
        assert cells["text"][1][3] == ""
        assert cells["customdata"][0][1][1].startswith(f"{images[2, 0, 1]} of {counts[2, 0, 1]} assignments are of")
        assert cells["y"] == ["layer 1", "layer 4"]
        (separation,) = opened.plot(f'[data-chart="separation of image and text, by layer"] >> nth={number}')
        np.testing.assert_allclose(separation["z"], modality_separation(counts, images, TOPK).T, atol=1e-6)
        assert (separation["zmin"], separation["zmax"]) == (0, 1)
    lines = opened.plot('[data-chart="Busiest expert, of image and of text tokens"]')
    assert sorted(line["y"][0] for line in lines) == [0.25, 0.25, 0.5, 0.5]
    # The slider of the first run is its own.
    opened.page.locator('[data-chart="modalities"] >> nth=0 >> xpath=.. >> input[type="range"]').press("Home")
    counts, images = made["a"]
    opened.page.wait_for_function(
        "() => document.querySelector('[data-chart=modalities]').previousSibling.textContent.startsWith('step 1:')"
    )
    (cells,) = opened.plot('[data-chart="modalities"] >> nth=0')
    np.testing.assert_allclose(np.array(cells["z"], dtype=float), specialization(counts[0], images[0], TOPK), atol=6e-4)
    counts, images = made["b"]
    (cells,) = opened.plot('[data-chart="modalities"] >> nth=1')
    np.testing.assert_allclose(np.array(cells["z"], dtype=float), specialization(counts[2], images[2], TOPK), atol=6e-4)
    assert (opened.dialogs, opened.requests, opened.problems) == ([], [], [])


def test_images_stand_beside_their_responses_and_nothing_else_is_run_or_asked_for(browser: Any, tmp_path: Path) -> None:
    samples = [
        sample(0, HOSTILE, NAMES[:2]),
        sample(1, "gone", NAMES[2:]),
        sample(2, "text", ["../../x", '"><script>alert(3)</script>']),
    ]
    run = make_run(tmp_path / "run", {1: METRICS}, samples=samples)
    (run / "thumbnails").mkdir()
    for name, shade in zip(NAMES[:2], (10, 200), strict=True):
        pixels = np.full((24, 48, 3), shade, dtype=np.uint8)
        (run / "thumbnails" / f"{name}.png").write_bytes(thumbnail_of(pixels))
    opened = report_of(browser, run)
    rows = opened.page.locator(".with_images tbody tr")
    assert opened.page.locator(".with_images th").all_inner_texts()[2] == "image"
    sizes = rows.nth(0).locator("img").evaluate_all("(all) => all.map((one) => [one.naturalWidth, one.naturalHeight])")
    assert sizes == [[48, 24], [48, 24]]
    assert rows.nth(0).locator("pre").all_inner_texts() == [HOSTILE, HOSTILE]
    assert [rows.nth(row).locator("td").nth(2).inner_text().strip() for row in (1, 2)] == ["not shown", ""]
    (note,) = opened.page.locator("[data-run] .notes").all_inner_texts()
    assert note.startswith("images of samples that cannot be shown: 1")
    assert (opened.dialogs, opened.requests, opened.problems) == ([], [], [])


def test_a_run_without_an_image_says_so_and_one_of_text_says_nothing(browser: Any, tmp_path: Path) -> None:
    counts = random_counts(3, 2, 4, 50)
    metrics = {"train/loss": 1.0, "train/moe/image/token_share": 0.0}
    opened = report_of(browser, make_run(tmp_path / "vision", {1: metrics}, counts, image_counts=0 * counts))
    assert SECTION in headings(opened)
    assert opened.page.get_by_text("No step had tokens of both kinds").count() == 1
    assert opened.plot('[data-chart="Share of image tokens"]')[0]["y"] == [0]
    assert opened.page.locator('[data-chart="modalities"]').count() == 0
    text = {name: value for name, value in sample(0, "x", []).items() if name != "thumbnails"}
    plain = make_run(tmp_path / "text", {1: {"train/loss": 1.0}}, counts, samples=[text])
    opened = report_of(browser, plain)
    assert SECTION not in headings(opened)
    assert opened.page.locator(".with_images, img").count() == 0
    assert "image" not in opened.page.locator("th").all_inner_texts()

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The page of an audit, opened in a real browser."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.routing.audit.auditor import audit_step
from nemo_rl_moe.routing.audit.sources import open_source
from tests.functional.browser import OpenPage, open_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, repository_root: Path) -> dict[str, Path]:
    """Captures of a shipped example, healthy and with two layers swapped."""
    examples, folder = repository_root / "examples" / "audit", tmp_path_factory.mktemp("captures")
    for name in ("healthy", "layer_swapped"):
        beside = ["--model", str(examples / "model"), "--training", str(examples / "transformers")]
        cli.main(["audit", str(examples / "slime" / name), *beside, "--write-capture", str(folder / name)])
    return {name: folder / name for name in ("healthy", "layer_swapped")}


def opened(browser: Any, captures: list[Path], output: Path) -> OpenPage:
    cli.main(["audit", *map(str, captures), "--html", str(output)])
    return open_page(browser, output)


def test_the_swapped_layers_are_the_first_thing_to_see(browser: Any, example: dict[str, Path], tmp_path: Path) -> None:
    page = opened(browser, [example["layer_swapped"]], tmp_path / "audit.html")
    reported = page.page.locator("[data-run]").nth(0).locator(".findings li").all_inner_texts()
    assert [text.split(":")[0] for text in reported] == [
        "layer 1 carries layer 2's routes",
        "layer 2 carries layer 1's routes",
    ]
    source = open_source(example["layer_swapped"], "capture", None, None, None)
    (step,) = source.read
    audited = audit_step(source.description, step, source.read[step]())
    (cells,) = page.plot('[data-chart="identity"]')
    np.testing.assert_allclose(np.array(cells["z"]), audited.layer_overlap, rtol=1e-6)
    assert cells["z"][0][1] > 0.9 > 0.5 > cells["z"][0][0]
    for number, load in enumerate((audited.rollout_load, audited.training_load)):
        assert load is not None
        heat = page.plot(f'[data-heatmap="{number}"]')[0]
        np.testing.assert_array_equal(np.array(heat["customdata"])[..., 0], load)
    assert (page.requests, page.problems) == ([], [])


def test_two_runs_stand_beside_each_other(browser: Any, example: dict[str, Path], tmp_path: Path) -> None:
    page = opened(browser, [example["healthy"], example["layer_swapped"]], tmp_path / "audit.html")
    names = page.page.locator("[data-run] h3").all_inner_texts()
    assert names == [f"{capture}: {side}" for capture in example.values() for side in ("rollout", "training")]
    assert page.page.locator("[data-run]").nth(0).locator(".findings li").all_inner_texts() == ["No findings."]
    assert (page.requests, page.problems) == ([], [])

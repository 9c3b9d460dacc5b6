# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports of runs that no test could wait for, or that are broken, opened in a real browser."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe import cli
from tests.functional.browser import open_page
from tests.support.made_runs import make_run, random_counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BUILT_IN = ("constructor", "toString", "__proto__", "hasOwnProperty")
"""What every object of JavaScript has."""


def test_many_runs_of_many_layers_are_drawn(browser: Any, tmp_path: Path) -> None:
    metrics = {step: {"train/loss": 1.0} for step in range(1, 301)}
    run = make_run(tmp_path / "run", metrics, random_counts(300, 94, 4, 20))
    output = tmp_path / "report.html"
    # 5 x 94 x 300 values in the charts of layers over time.
    assert cli.main(["report", *[str(run)] * 5, "--output", str(output)]) == 0
    opened = open_page(browser, output)
    assert opened.page.locator('[data-chart="spread of each layer"] .main-svg').count() >= 5
    assert (opened.problems, opened.page.locator(".error").count()) == ([], 0)
    opened.page.close()


def test_metrics_may_have_any_name(browser: Any, tmp_path: Path) -> None:
    with_names = make_run(tmp_path / "a", {step: dict.fromkeys(BUILT_IN, float(step)) for step in (1, 2)})
    without = make_run(tmp_path / "b", {1: {"train/loss": 1e39}})
    output = tmp_path / "report.html"
    assert cli.main(["report", str(with_names), str(without), "--output", str(output)]) == 0
    opened = open_page(browser, output)
    for name in BUILT_IN:
        opened.page.locator('select[aria-label="metric"]').select_option(name)
        opened.page.wait_for_function(
            "(name) => document.querySelector('[data-chart=\"any metric\"]').data[0].name.endsWith(name)", arg=name
        )
        (trace,) = opened.plot('[data-chart="any metric"]')
        assert (trace["x"], trace["y"]) == ([1, 2], [1, 2])
    assert opened.plot('[data-chart="Loss"]')[0]["y"] == [1e39]
    assert opened.page.locator("p.notes", has_text="NaN or infinite").count() == 0
    assert opened.problems == []
    opened.page.close()


@pytest.mark.parametrize(
    ("whole", "broken"),
    [
        ('"dead":{"blob":"arrays"', '"dead":{"blob":"none"'),  # fails while the section is made
        ('"outliers":{"steps":{"blob":"arrays"', '"outliers":{"steps":{"blob":"none"'),  # fails while it is drawn
    ],
)
def test_a_chart_that_cannot_be_drawn_says_so_and_leaves_the_others(
    browser: Any, tmp_path: Path, whole: str, broken: str
) -> None:
    run = make_run(tmp_path / "run", {1: {"train/loss": 1.0}}, random_counts(3, 2, 4, 20))
    output = run / "report.html"
    assert cli.main(["report", str(run)]) == 0
    page = output.read_text(encoding="utf-8")
    assert page.count(whole) == 1
    output.write_text(page.replace(whole, broken), encoding="utf-8")
    opened = open_page(browser, output, "incomplete")
    assert opened.page.locator(".error").count() == 1
    assert opened.page.locator(".error").inner_text().startswith("This cannot be drawn: TypeError")
    for drawn in ('[data-chart="Loss"]', '[data-chart="spread of each layer"]', '[data-chart="what-if"]'):
        assert opened.plot(drawn)
    assert opened.page.locator("h3", has_text="All settings").count() == 1
    opened.page.close()

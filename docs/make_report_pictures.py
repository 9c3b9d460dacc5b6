# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The pictures of the report: two runs compared, and the load of every expert.

    pip install -e '.[test]' and a Chromium
    python docs/make_report_pictures.py logs/drill_free/exp_001 logs/drill_forced/exp_001

forced-imbalance.md has the commands that make the two runs.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from nemo_rl_moe.report.command import write_report

IMAGES = Path(__file__).resolve().parent / "images"
EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")


def open_report(page: Page, report: Path) -> None:
    """Waits until all charts are drawn."""
    page.goto(report.as_uri())
    page.wait_for_selector('html[data-state="ready"]')


def photograph(page: Page, first: str, last: str, output: Path) -> None:
    """All from the top of one heading's part to the top of another's."""
    tops = [page.locator("h1, h2", has_text=text).bounding_box() for text in (first, last)]
    assert tops[0] is not None
    assert tops[1] is not None
    top, bottom = tops[0]["y"] - 12, tops[1]["y"] - 18
    page.screenshot(path=output, full_page=True, clip={"x": 0, "y": top, "width": 1400, "height": bottom - top})


def main() -> None:
    """Reads two runs' folders."""
    parser = argparse.ArgumentParser(description="Photographs reports of runs.")
    parser.add_argument("free", type=Path, help="folder of a run")
    parser.add_argument("forced", type=Path, help="folder of the same run with forced routing")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the pictures; default: %(default)s")
    chosen = parser.parse_args()
    executable = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        report = Path(name) / "report.html"
        write_report([chosen.free, chosen.forced], report)
        page = playwright.chromium.launch(executable_path=executable).new_page(viewport={"width": 1400, "height": 900})
        open_report(page, report)
        photograph(page, "Runs compared", "Training", chosen.output / "report_findings.png")
        photograph(page, "Balance of the experts", "Layers and experts", chosen.output / "report_comparison.png")
        photograph(page, "Layers and experts", "Where and when", chosen.output / "report_heatmap.png")


if __name__ == "__main__":
    main()

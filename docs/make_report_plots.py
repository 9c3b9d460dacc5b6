# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The plots of the report: two runs compared, and the load of every expert; image and text tokens; or one run.

    pip install -e '.[test]' and a Chromium
    python docs/make_report_plots.py logs/drill_free/exp_001 logs/drill_forced/exp_001
    python docs/make_report_plots.py --images logs/vlm_sft_tiny_moe/exp_001 logs/vlm_grpo_tiny_moe/exp_001
    python docs/make_report_plots.py results/real_demo/grpo-0/logs/exp_001

forced-imbalance.md has the commands that make the first two runs, `make demo-vision` makes the other two. `make
demo-real` makes the last, whose picture is that of README.md.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from nemo_rl_moe.runs.folder.run_data import read_run
from nemo_rl_moe.runs.report.command import write_page

IMAGES = Path(__file__).resolve().parent / "images"
EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")


def open_report(page: Page, report: Path) -> None:
    """Open a report and wait for all charts."""
    page.goto(report.as_uri())
    page.wait_for_selector('html[data-state="ready"]')


def photograph(page: Page, first: str, last: str, output: Path, last_kind: str = "h1, h2") -> None:
    """All from the top of one heading's part to the top of another's, which is a card's where its kind is h3."""
    headings = (page.locator("h1, h2", has_text=first), page.locator(last_kind, has_text=last))
    tops = [heading.bounding_box() for heading in headings]
    assert tops[0] is not None
    assert tops[1] is not None
    top, bottom = tops[0]["y"] - 12, tops[1]["y"] - 18
    page.screenshot(path=output, full_page=True, clip={"x": 0, "y": top, "width": 1400, "height": bottom - top})


def photograph_one(page: Page, output: Path) -> None:
    """The findings of a run and the load of every expert, one above the other."""
    photograph(page, "Report of a run", "Learning from rewards", output)
    with Image.open(output) as image:
        findings = image.convert("RGB")
    # The slider shows nothing in a picture.
    page.locator("h2, h3", has_text="Load of every expert").evaluate(
        "title => title.parentElement.style.display = 'none'"
    )
    photograph(page, "Layers and experts", "Where and when", output)
    with Image.open(output) as image:
        joined = Image.new("RGB", (image.width, findings.height + image.height))
        joined.paste(findings)
        joined.paste(image, (0, findings.height))
    joined.save(output)
    shrink(output)


def shrink(plot: Path) -> None:
    """Writes it again with as many colours as anybody sees in it."""
    with Image.open(plot) as image:
        image.convert("RGB").quantize(128).save(plot, optimize=True)


def main() -> None:
    """Reads two runs' folders."""
    parser = argparse.ArgumentParser(description="Photographs reports of runs.")
    parser.add_argument("first", type=Path, help="folder of a run")
    parser.add_argument("second", type=Path, nargs="?", help="folder of a run like it, with forced routing")
    parser.add_argument("--images", action="store_true", help="the runs are of a model with vision")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the plots; default: %(default)s")
    chosen = parser.parse_args()
    executable = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        report = Path(name) / "report.html"
        write_page([read_run(each) for each in (chosen.first, chosen.second) if each is not None], report)
        page = playwright.chromium.launch(executable_path=executable).new_page(viewport={"width": 1400, "height": 900})
        open_report(page, report)
        if chosen.second is None:
            photograph_one(page, chosen.output / "report_real_model.png")
            return
        if chosen.images:
            photograph(page, "Image and text tokens", "Busiest expert", chosen.output / "report_images.png", "h3")
            shrink(chosen.output / "report_images.png")
            return
        photograph(page, "Runs compared", "Training", chosen.output / "report_findings.png")
        photograph(page, "Balance of the experts", "Layers and experts", chosen.output / "report_comparison.png")
        photograph(page, "Layers and experts", "Where and when", chosen.output / "report_heatmap.png")


if __name__ == "__main__":
    main()

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe report`: writes a self-contained HTML file about one or more runs.

The content security policy of the page forbids all requests. It also forbids all scripts except the page's script and
plotly, which it identifies by their hashes. Content from a run only becomes data of the page.
"""

import argparse
import base64
import hashlib
import html
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.errors import ConfigurationError, DataError, counted

if TYPE_CHECKING:
    # The command line starts faster without numpy and pyarrow.
    from nemo_rl_moe.runs.folder.run_data import RunData
    from nemo_rl_moe.runs.report.page_data import PageData, PageWords

SUMMARY = "write one HTML file about a run, or about several side by side; it opens from disk, without a network"
EXAMPLES = """\
examples:
  nemo-rl-moe report logs/sft_tiny_moe/exp_001
  nemo-rl-moe report logs/drill_free/exp_001 logs/drill_forced/exp_001 --output comparison.html
"""
FILE_NAME = "report.html"
MOST_BYTES = 5_000_000
_SPARE_BYTES = 60_000
_MARK = "<!DOCTYPE html><!-- nemo-rl-moe report -->"
_SCRIPTS = (
    "decode",
    "words",
    "plots",
    "charts",
    "time_line",
    "slider",
    "heatmap",
    "history",
    "tables",
    "conversations",
    "routing",
    "modalities",
    "main",
)
_PAGE = files("nemo_rl_moe.runs.report") / "page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run's folder, such as logs/sft/exp_001"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the HTML file; default: {FILE_NAME} in the first run's folder",
    )


def run(options: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Write the report, and print its path and the number of findings of each run."""
    from nemo_rl_moe.runs.folder.run_data import read_run

    folders = [*options.runs, *map(Path, more)]
    output = options.output or folders[0] / FILE_NAME
    runs = [read_run(folder) for folder in folders]
    check_output(output, "--output")
    findings = write_page(runs, output)
    size = output.stat().st_size
    print(f"wrote {output} ({size / 1e6:.1f} MB)")
    if size > MOST_BYTES:
        print(f"{output}: larger than {MOST_BYTES / 1e6:g} MB, the limit for reports; name fewer runs")
    for folder, number in zip(folders, findings, strict=True):
        print(f"{folder}: {counted(number, 'finding', zero='no')}")


def write_page(runs: "Sequence[RunData]", output: Path, words: "PageWords | None" = None) -> list[int]:
    """Write a report about runs that have been read, and return the number of findings of each run."""
    from nemo_rl_moe.runs.report.page_data import page_data

    data = page_data(runs, MOST_BYTES - _SPARE_BYTES - len(_plotly()[1]), words)
    try:
        write_whole(output, _page(data))
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error}") from None
    return data.num_findings


def check_output(output: Path, option: str) -> None:
    """Raise a DataError if the output would replace a file that is not a report, since its name may be mistyped."""
    if output.is_dir():
        raise DataError(f"{option} {output}: is a folder; did you mean {output / FILE_NAME}?")
    if not output.parent.is_dir():
        raise DataError(f"{option} {output}: there is no folder {output.parent}")
    if output.exists():
        with output.open("rb") as file:
            if file.read(len(_MARK)) != _MARK.encode():
                raise DataError(f"{option} {output}: exists and is no report; only a report may be replaced")


def _page(data: "PageData") -> str:
    plotly, packed_plotly = _plotly()
    script = "\n".join(['"use strict";', *((_PAGE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)])
    # Browsers do not run script blocks of these types. The page's script reads them.
    blobs = {"plotly": packed_plotly, **data.blobs}
    blocks = [f'<script type="application/gzip" id="{name}">{blob}</script>' for name, blob in blobs.items()]
    blocks.append(f'<script type="application/json" id="document">{data.text}</script>')
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, plotly)]
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return _MARK + Template((_PAGE / "page.html").read_text(encoding="utf-8")).substitute(
        policy=html.escape(policy),
        title=html.escape(data.title),
        style=(_PAGE / "style.css").read_text(encoding="utf-8"),
        blocks="\n".join(blocks),
        script=script,
    )


@cache
def _plotly() -> tuple[str, str]:
    """Return the script of plotly, as text and as gzip in base64."""
    from nemo_rl_moe.runs.report.arrays import compressed_text

    # Importing the package would take seconds.
    spec = find_spec("plotly")
    folders = (spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ConfigurationError("report: the charts need plotly: pip install plotly")
    source = (Path(next(iter(folders))) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return source, compressed_text(source.encode())

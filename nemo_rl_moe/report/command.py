# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe report`: one HTML file about one run or several."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_moe.errors import DataError

SUMMARY = "one HTML file about a run, or about several beside each other; opens from disk, without a network"
EXAMPLES = """\
examples:
  nemo-rl-moe report logs/sft_tiny_moe/exp_001
  nemo-rl-moe report logs/drill_free/exp_001 logs/drill_forced/exp_001 --output comparison.html
"""
FILE_NAME = "report.html"
MOST_BYTES = 5_000_000
_SPARE_BYTES = 60_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run's folder, such as logs/sft/exp_001"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the HTML file; default: {FILE_NAME} in the first run's folder"
    )


def run(options: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Writes the report, and says where it is and how many findings each run has.

    Args:
        options: What `add_arguments` asks for.
        more: Folders that stand behind an option.

    Raises:
        DataError: A folder is no run's, or the file cannot be written.
    """
    folders = [*options.runs, *map(Path, more)]
    output = options.output or folders[0] / FILE_NAME
    findings = write_report(folders, output)
    size = output.stat().st_size
    print(f"wrote {output} ({size / 1e6:.1f} MB)")
    if size > MOST_BYTES:
        print(f"{output}: above the {MOST_BYTES / 1e6:g} MB that reports are to stay below; name fewer runs")
    for folder, number in zip(folders, findings, strict=True):
        print(f"{folder}: {number or 'no'} finding{'' if number == 1 else 's'}")


def write_report(folders: Sequence[Path], output: Path) -> list[int]:
    """Writes the report of these runs.

    Returns:
        How many findings each of them has.

    Raises:
        DataError: A folder is no run's, or the file cannot be written.
    """
    from nemo_rl_moe.report.page import PageParts
    from nemo_rl_moe.report.page_data import page_data
    from nemo_rl_moe.run_folder.run_data import read_run

    runs = [read_run(folder) for folder in folders]
    _check_output(output)
    parts = PageParts()
    data = page_data(runs, MOST_BYTES - _SPARE_BYTES - parts.size)
    _write_whole(output, parts.page(data))
    return data.num_findings


def _check_output(output: Path) -> None:
    """A mistyped name must not cost a file that is something else."""
    from nemo_rl_moe.report.page import MARK

    if output.is_dir():
        raise DataError(f"--output {output}: is a folder; did you mean {output / FILE_NAME}?")
    if not output.parent.is_dir():
        raise DataError(f"--output {output}: there is no folder {output.parent}")
    if output.exists():
        with output.open("rb") as file:
            if file.read(len(MARK)) != MARK.encode():
                raise DataError(f"--output {output}: exists and is no report; only a report is replaced by a report")


def _write_whole(output: Path, page: str) -> None:
    """A report that is open in a browser is never half a report."""
    try:
        descriptor, staging = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.write(page)
            Path(staging).chmod(0o666 & ~_umask())
            Path(staging).replace(output)
        except BaseException:
            Path(staging).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error}") from None


def _umask() -> int:
    """What the process takes from the rights of new files; it can be read only by setting it."""
    found = os.umask(0o077)
    os.umask(found)
    return found

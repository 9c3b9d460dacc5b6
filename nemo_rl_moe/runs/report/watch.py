# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe watch`: terminal view of a running run."""

import argparse
import io
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_moe.errors import ConfigurationError, DataError, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleDimensions
    from rich.text import Text

    from nemo_rl_moe.runs.report.watch_state import RunWatcher

SUMMARY = "show a running run in the terminal: sparklines, expert load, findings"
EXAMPLES = """\
content:
  step, speed, and whether the run still writes
  reward, loss, gradient norm, cv (spread of the expert loads; "cv excess" is the part beyond chance) and overload
  (work of the busiest expert-parallel rank over the mean)
  load of each expert in the newest step: white is the fair share, red more, blue less, yellow or x a dead expert
  findings, by the limits in logger.alerts of the run's configuration

  Ctrl-C ends the view, not the run. If the output is not a terminal, one frame is printed as plain text.

examples:
  nemo-rl-moe watch logs/sft_tiny_moe/exp_001
  nemo-rl-moe watch logs/sft_tiny_moe/exp_001 --interval 5
  nemo-rl-moe watch logs/sft_tiny_moe/exp_001 --once | less
"""
_LEAST_INTERVAL, _LONGEST_INTERVAL = 0.1, 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder, such as logs/sft/exp_001")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="seconds between two frames; default: 1"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def run(options: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Show a run until Ctrl-C, or print one frame."""
    if more:
        raise ConfigurationError(f"watch: takes one RUN_DIR, got also {printable(' '.join(more))!r}")
    try:
        _check(options.run)
        from nemo_rl_moe.runs.report.watch_state import RunWatcher

        watcher = RunWatcher(options.run)
        console = _console()
        is_live = console.is_terminal and not console.is_dumb_terminal and sys.stdout.isatty()
        if options.once or not is_live:
            console.print(_frame(console, watcher, has_height=is_live), soft_wrap=True)
        else:
            _watch(console, watcher, options.interval)
    except KeyboardInterrupt:
        return  # the usual way to end the view


def _watch(console: "Console", watcher: "RunWatcher", interval: float) -> None:
    from rich.live import Live

    # Exit instead of being killed, so that `Live` restores the terminal.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    view = None
    try:
        with Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live:
            size: ConsoleDimensions | None = None
            while True:
                shown, view = (size, view), _frame(console, watcher, has_height=True)
                size = console.size
                if (size, view) != shown:
                    live.update(view, refresh=True)
                time.sleep(interval)
    finally:
        # The alternate screen is closed by now. The last frame is printed to the normal screen, and remains there.
        if view is not None:
            console.print(view, soft_wrap=True)


def _frame(console: "Console", watcher: "RunWatcher", *, has_height: bool) -> "Text":
    from rich.text import Text

    from nemo_rl_moe.runs.report.watch_frame import Room, frame

    room = Room(
        width=max(console.width, 20),
        height=max(console.height - 1, 1) if has_height else None,
        in_color=console.color_system in ("256", "truecolor") and not console.no_color,
        is_unicode=console.encoding.lower().startswith("utf"),
    )
    return Text("\n", no_wrap=True).join(frame(watcher.look(), time.time(), room))


def _console() -> "Console":
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A run's name may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, markup=False, emoji=False)


def _check(folder: Path) -> None:
    """Raise a DataError if a folder is not the folder of a run. Metrics may still be missing in it."""
    from nemo_rl_moe.runs.folder.folder import RUN_FILE_NAME, newest_run_folders
    from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME

    if any((folder / name).is_file() for name in (METRICS_FILE_NAME, RUN_FILE_NAME)):
        return
    what = f"holds no {METRICS_FILE_NAME}" if folder.is_dir() else "is no folder"
    newest = next(iter(newest_run_folders(folder if folder.is_dir() else folder.parent)), None)
    hint = f"did you mean {newest}, the newest run there?" if newest else "expected a run, such as logs/sft/exp_001"
    raise DataError(printable(f"{folder}: {what}; {hint}", kept=""))


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if _LEAST_INTERVAL <= (seconds := float(text)) <= _LONGEST_INTERVAL:
            return seconds
    raise argparse.ArgumentTypeError(
        f"got {text!r}, expected a number of seconds from {_LEAST_INTERVAL:g} to {_LONGEST_INTERVAL:g}"
    )

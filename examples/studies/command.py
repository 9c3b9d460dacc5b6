# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a study's command: options, errors, and runs in one or more processes.

This module does not import torch before `OMP_NUM_THREADS` is set.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from examples.studies.results import Measures, Result, RunT
    from examples.studies.session import Study

Value = TypeVar("Value", str, int)
SETTINGS_FILE = "study.json"
"""File with the settings of all runs of a folder."""


def study_parser(
    prog: str, description: str, output: Path, seeds: int | None
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of a study with the commands `run` and `tables`, and the parser of `run` for more options.

    Args:
        output: Default of the study's folder.
        seeds: Default number of seeds per cell. None if the study decides.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run", help="make the runs that are missing", description=description, formatter_class=raw
    )
    shown = "" if seeds is None else " (default: %(default)s)"
    run.add_argument("--seeds", type=count, default=seeds, metavar="N", help=f"of each cell{shown}")
    run.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    run.add_argument("--jobs", type=count, default=1, metavar="N", help="runs at a time, on a core each (default: 1)")
    run.add_argument("--model", metavar="DIR", help="begin with this model instead of one that the command trains")
    run.add_argument("--dry-run", action="store_true", help="print the number of runs and the hours; start nothing")
    run.add_argument("--job", type=int, help=argparse.SUPPRESS)
    run.add_argument("overrides", nargs="*", metavar="override", help="section.key=value, of all runs")
    tables = commands.add_parser("tables", help="print the tables of the runs that are done, and draw the image")
    for command in (run, tables):
        command.add_argument(
            "--output", type=Path, default=output, metavar="DIR", help="folder of the study (default: %(default)s)"
        )
    return parser, run


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code: 2 for wrong input, 1 for a failed run, 130 after an interrupt."""
    # Must precede the import of torch here and in the runs' processes, since waiting threads spin and take the core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from nemo_rl_moe.errors import (
        GenerationError,
        RoutingAnomalyError,
        UserError,
        WeightSyncError,
        WorkerDiedError,
        report_error,
    )

    try:
        return command()
    except UserError as error:
        for problem in error.problems:
            report_error(problem)
        return error.exit_code
    except (WorkerDiedError, WeightSyncError, GenerationError, RoutingAnomalyError) as error:
        report_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT


def some_of(allowed: Iterable[Value]) -> Callable[[str], list[Value]]:
    """Return a parser of a comma-separated choice, which keeps the order of `allowed`."""
    by_text = {str(value): value for value in allowed}

    def parse(text: str) -> list[Value]:
        chosen = text.split(",")
        if wrong := [word for word in chosen if word not in by_text]:
            raise argparse.ArgumentTypeError(f"got {', '.join(wrong)}, expected some of {','.join(by_text)}")
        return [value for word, value in by_text.items() if word in chosen]

    return parse


def count(text: str) -> int:
    """Parse a number of runs, seeds or jobs."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return int(text)


def check_settings(path: Path, wanted: dict[str, object]) -> None:
    """Write the common settings of a folder's runs, or compare them with the stored ones.

    Raises:
        ConfigurationError: The folder has runs with other settings.
    """
    from nemo_rl_moe.atomic_writes import write_whole
    from nemo_rl_moe.errors import ConfigurationError

    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=1) + "\n")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ConfigurationError(
                f"--output {path.parent}: its runs have the {key} {found.get(key)}, got {value}; expected the same, or"
                " another folder"
            )


def run_missing(
    options: argparse.Namespace,
    words: Sequence[str],
    runs: "Sequence[RunT]",
    *,
    module: str,
    settings: dict[str, object],
    prepare: Callable[[Path], tuple[Path, str]],
    study_of: "Callable[[Path, Path, str], Study[RunT]]",
    seconds_per_run: float,
) -> int:
    """Make the missing runs of a study, in one or more processes, and return the exit code.

    Args:
        options: Options of `study_parser`, from `words`.
        module: Module of the study, which is started for each of several jobs.
        settings: Common settings of the folder's runs.
        prepare: Takes the study's folder. Returns the folders of the data and of the initial model.
        study_of: Takes the folders of the study and the data, and the model.
        seconds_per_run: Estimate until a run is complete.
    """
    from examples.studies.results import read_results
    from examples.studies.session import median_seconds

    output: Path = options.output.resolve()
    done = read_results(output / "runs", runs)
    pending = [run for run in runs if run not in done]
    if options.job is None:
        hours = len(pending) * median_seconds(done.values(), seconds_per_run) / 3600 / options.jobs
        print(f"{len(runs)} runs, {len(done)} of them done; the others take about {hours:.1f} h", flush=True)
    if options.dry_run or not pending:
        return 0
    output.mkdir(parents=True, exist_ok=True)
    check_settings(output / SETTINGS_FILE, settings | {"model": options.model, "overrides": options.overrides})
    data, model = prepare(output)
    if options.jobs > 1:
        return run_jobs(module, words, options.jobs)
    return run_session(study_of(output, data, model), pending, len(runs), options.job, seconds_per_run)


def show_tables(
    output: Path,
    runs: "Sequence[RunT]",
    measures: "Measures",
    *,
    tables: "Callable[[dict[RunT, Result]], str]",
    draw: "Callable[[dict[RunT, Result], Path], None]",
) -> int:
    """Print and write the tables of the complete runs and the image, and return the exit code.

    Raises:
        DataError: No run is complete.
    """
    from examples.studies.results import measured_again, read_results
    from nemo_rl_moe.atomic_writes import write_whole
    from nemo_rl_moe.errors import DataError

    done = read_results(output / "runs", runs)
    results = {run: measured_again(output / "runs" / run.name, result, measures) for run, result in done.items()}
    if not results:
        raise DataError(f"--output {output}: no run is done")
    text = tables(results)
    print(text)
    write_whole(output / "tables.md", text + "\n")
    draw(results, output / "study.png")
    print(f"image: {output / 'study.png'}")
    return 0


def run_jobs(module: str, words: Sequence[str], number_of_jobs: int) -> int:
    """Start several processes, which share the runs, and return the worst exit code."""
    from examples.studies.programs import run_programs

    command = [sys.executable, "-m", module, *words, "--jobs", "1", "--job"]
    return run_programs([[*command, str(number)] for number in range(number_of_jobs)])


def run_session(
    study: "Study[RunT]", pending: "Sequence[RunT]", num_runs: int, job: int | None, seconds_per_run: float
) -> int:
    """Make the missing runs one after the other, report each, and return the exit code.

    Args:
        num_runs: Number of all runs, with the complete ones.
        job: Number of this process. None if it is the only one.
        seconds_per_run: Estimate until the first run is complete.
    """
    from examples.studies.results import read_results
    from examples.studies.session import make_runs, median_seconds, running_ray
    from nemo_rl_moe.distributed.run_process import StopSignals

    for run in pending:
        study.config(run)  # reports errors of any run before the first one starts
    began = time.monotonic()

    def report(run: "RunT", result: "Result") -> None:
        done = read_results(study.runs_folder, pending)
        num_left = len(pending) - len(done)
        hours = num_left * median_seconds(done.values(), seconds_per_run) / 3600
        outcome = "diverged" if result.diverged else f"accuracy {result.measures.get('accuracy', math.nan):.3f}"
        so_far = (time.monotonic() - began) / 60
        print(
            f"[{num_runs - num_left}/{num_runs}] {run.name}  {outcome}  {result.seconds:.0f} s"
            f"  ({so_far:.0f} min so far, {hours:.1f} h left for one job)",
            flush=True,
        )

    with StopSignals() as stop_signals, running_ray(os.getpid() if job is None else job):
        make_runs(study, pending, stop_signals, report)
    if (reason := stop_signals.reason()) is not None:
        print(f"stopped ({reason}); the same command goes on", flush=True)
        return 128 + signal.Signals[reason]
    return 0

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routing study: does it help to train with the experts of the rollout, and what do the alternatives do?

python -m examples.routing_study run --grid small --cells none,r3 --updates 8 --dtypes bfloat16 --seeds 24
python -m examples.routing_study tables
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from examples.routing_study.grid import (
    BASELINE,
    DTYPES,
    METHODS,
    MODELS,
    SECONDS_PER_RUN,
    UPDATES,
    Run,
    hours_left,
    plan,
)

Value = TypeVar("Value", str, int)

OUTPUT = Path("results/routing_study")
SETTINGS_FILE = "study.json"
"""Settings that all runs of a folder share."""


def _hours_of_grid(model: str) -> str:
    """Return the hours of a whole grid with as many seeds as a difference of 3% takes, one run at a time."""
    return f"{hours_left(plan(model, list(METHODS), DTYPES, UPDATES, range(24)), {}, 1):.0f}"


_DESCRIPTION = f"""\
GRPO runs of a tiny Mixture-of-Experts model with rollouts by vLLM, on CPU cores: cells of a method, a number of
updates a step and a number format of the rollouts, each with several seeds. Stopped, the same command goes on with the
runs that are missing. It is started in the repository's root.

A run takes about {SECONDS_PER_RUN["small"]:.0f} s (small) or {SECONDS_PER_RUN["deep"]:.0f} s (deep) on a core; the
whole grid with 24 seeds {_hours_of_grid("small")} h (small) or {_hours_of_grid("deep")} h (deep), half of that with
--jobs 2 on two cores. --dry-run says how many hours a choice takes, and starts nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 2 for wrong input, 1 for a run that failed, 130 and 143 when stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    # Before torch is imported, here and in the runs' processes: threads that wait by spinning would take the core.
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
        return _tables(options.output) if options.command == "tables" else _run(options, words)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.routing_study",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="make the runs that are missing",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--grid", choices=MODELS, default="small", help="the model (default: %(default)s)")
    run.add_argument("--cells", type=_some_of(METHODS), default=list(METHODS), help=f"of {','.join(METHODS)}")
    run.add_argument("--updates", type=_some_of(UPDATES), default=list(UPDATES), help="updates a step, of 1,2,4,8")
    run.add_argument("--dtypes", type=_some_of(DTYPES), default=list(DTYPES), help=f"rollouts, of {','.join(DTYPES)}")
    run.add_argument("--seeds", type=_count, default=8, metavar="N", help="of each cell (default: %(default)s)")
    run.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    run.add_argument("--jobs", type=_count, default=1, metavar="N", help="runs at a time, on a core each (default: 1)")
    run.add_argument("--model", metavar="DIR", help="begin with this model instead of one that the command trains")
    run.add_argument("--dry-run", action="store_true", help="say what would run, and how long; start nothing")
    run.add_argument("--job", type=int, help=argparse.SUPPRESS)
    run.add_argument("overrides", nargs="*", metavar="override", help="section.key=value, of all runs")
    tables = commands.add_parser("tables", help="print the tables of the runs that are done, and draw the image")
    for command in (run, tables):
        command.add_argument(
            "--output", type=Path, default=OUTPUT, metavar="DIR", help="folder of the study (default: %(default)s)"
        )
    return parser


def _some_of(allowed: Iterable[Value]) -> Callable[[str], list[Value]]:
    """Return the parser of a comma-separated choice, in the order of what is allowed."""
    by_text = {str(value): value for value in allowed}

    def parse(text: str) -> list[Value]:
        chosen = text.split(",")
        if wrong := [word for word in chosen if word not in by_text]:
            raise argparse.ArgumentTypeError(f"got {', '.join(wrong)}, expected some of {','.join(by_text)}")
        return [value for word, value in by_text.items() if word in chosen]

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return int(text)


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from examples.routing_study.measures import read_results
    from nemo_rl_moe.generation.vllm.releases import check_installation

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = plan(options.grid, options.cells, options.dtypes, options.updates, seeds)
    output: Path = options.output.resolve()
    done = read_results(output / "runs", runs)
    measured = {options.grid: [result.seconds for result in done.values()]} if done else {}
    pending = [run for run in runs if run not in done]
    if options.job is None:
        hours = hours_left(pending, measured, options.jobs)
        source = "as long as those that are done" if done else "as measured on another, busy machine"
        print(f"{len(runs)} runs, {len(done)} of them done; the others take about {hours:.1f} h, {source}", flush=True)
    if options.dry_run or not pending:
        return 0
    check_installation(on_gpus=False)
    output.mkdir(parents=True, exist_ok=True)
    _check_settings(output / SETTINGS_FILE, options)
    if options.jobs > 1:
        _prepare(options, output)
        return _jobs(words, options.jobs)
    return _session(options, output, pending, len(runs))


def _check_settings(path: Path, options: argparse.Namespace) -> None:
    """Write down what all runs of the folder share, or compares it with what is there.

    Raises:
        ConfigurationError: The folder holds runs of other settings.
    """
    from nemo_rl_moe.atomic_writes import write_whole
    from nemo_rl_moe.errors import ConfigurationError

    wanted = {"model": options.model, "overrides": options.overrides}
    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=1) + "\n")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    for key, value in wanted.items():
        if found[key] != value:
            raise ConfigurationError(
                f"--output {path.parent}: its runs have the {key} {found[key]}, got {value}; expected the same, or"
                " another folder"
            )


def _prepare(options: argparse.Namespace, output: Path) -> tuple[Path, str]:
    """Return the data, and the model that runs begin with."""
    from examples.routing_study.preparation import make_data, make_model

    data = make_data(output)
    return data, options.model or str(make_model(options.grid, output, data))


def _jobs(words: Sequence[str], count: int) -> int:
    """Return several processes, each of which takes runs that no other one has."""
    from nemo_rl_moe.distributed.run_process import signal_when_parent_ends

    command = [sys.executable, "-m", "examples.routing_study", *words, "--jobs", "1", "--job"]
    jobs = [
        subprocess.Popen([*command, str(number)], preexec_fn=lambda: signal_when_parent_ends(signal.SIGTERM))
        for number in range(count)
    ]

    def pass_on(number: int, frame: object) -> None:
        for job in jobs:
            job.terminate()

    former = signal.signal(signal.SIGTERM, pass_on)
    try:
        return max(job.wait() for job in jobs)
    except KeyboardInterrupt:
        return max(job.wait() for job in jobs)  # the terminal has reported them too
    finally:
        signal.signal(signal.SIGTERM, former)


def _session(options: argparse.Namespace, output: Path, pending: Sequence[Run], num_runs: int) -> int:
    from examples.routing_study.measures import Result, read_results
    from examples.routing_study.session import Study, make_runs, running_ray
    from nemo_rl_moe.distributed.run_process import StopSignals

    data, model = _prepare(options, output)
    study = Study(output, model, data, options.overrides)
    for run in pending:
        study.config(run)  # so that what is wrong with one is reported before the first
    began = time.monotonic()

    def report_of(run: Run, result: Result) -> None:
        done = read_results(study.runs_folder, pending)
        left = [other for other in pending if other not in done]
        hours = hours_left(left, {options.grid: [other.seconds for other in done.values()]}, 1)
        outcome = "diverged" if result.diverged else f"accuracy {result.measures.get('accuracy', math.nan):.3f}"
        so_far = (time.monotonic() - began) / 60
        print(
            f"[{num_runs - len(left)}/{num_runs}] {run.name}  {outcome}  {result.seconds:.0f} s"
            f"  ({so_far:.0f} min so far, {hours:.1f} h left for one job)",
            flush=True,
        )

    with StopSignals() as stop_signals, running_ray(os.getpid() if options.job is None else options.job):
        make_runs(study, pending, stop_signals, report_of)
    if (reason := stop_signals.reason()) is not None:
        print(f"stopped ({reason}); the same command goes on", flush=True)
        return 128 + signal.Signals[reason]
    return 0


def _tables(output: Path) -> int:
    from examples.routing_study.measures import read_results
    from examples.routing_study.tables import draw, tables
    from nemo_rl_moe.atomic_writes import write_whole
    from nemo_rl_moe.errors import DataError

    everything = [run for model in MODELS for run in plan(model, list(METHODS), DTYPES, UPDATES, range(1000))]
    results = read_results(output / "runs", everything)
    if not any(run.method == BASELINE for run in results):
        raise DataError(f"--output {output}: no run of `{BASELINE}` is done, with which others are compared")
    text = tables(results)
    print(text)
    write_whole(output / "tables.md", text + "\n")
    if draw(results, output / "study.png"):
        print(f"image: {output / 'study.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The staleness study: what does it cost to train on responses of older weights, and which loss bears it?

python -m examples.staleness_study run --corrections clipped,tis --replays none --lags 0,2,8 --seeds 12
python -m examples.staleness_study tables
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.staleness_study.grid import CORRECTIONS, LAGS, REPLAYS, SECONDS_PER_RUN, plan
from examples.studies.command import SETTINGS_FILE, check_settings, count, exit_code_of, run_jobs, run_session, some_of

OUTPUT = Path("results/staleness_study")
_DESCRIPTION = """\
GRPO runs of a demo's tiny Mixture-of-Experts model on CPU cores: cells of a lag, a correction and a replay of routed
experts, each with several seeds. Stopped, the same command goes on with the runs that are missing. It is started in the
repository's root. --dry-run says how many hours a choice takes, and starts nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 2 for wrong input, 1 for a run that failed, 130 and 143 when stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    return exit_code_of(lambda: _tables(options.output) if options.command == "tables" else _run(options, words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.staleness_study",
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
    for name, allowed in (("corrections", list(CORRECTIONS)), ("replays", list(REPLAYS))):
        run.add_argument(f"--{name}", type=some_of(allowed), default=allowed, help=f"of {','.join(allowed)}")
    run.add_argument("--lags", type=some_of(LAGS), default=list(LAGS), help=f"of {','.join(map(str, LAGS))}")
    run.add_argument("--seeds", type=count, default=12, metavar="N", help="of each cell (default: %(default)s)")
    run.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    run.add_argument("--jobs", type=count, default=1, metavar="N", help="runs at a time, on a core each (default: 1)")
    run.add_argument(
        "--task",
        choices=("addition", "calculator"),
        default="addition",
        help="sums, or questions with a calculator as in make demo-tools (default: %(default)s)",
    )
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


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from examples.staleness_study.configuration import study_of
    from examples.staleness_study.tasks import TASKS
    from examples.studies.results import read_results
    from examples.studies.session import median_seconds

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = plan(options.corrections, options.replays, options.lags, seeds)
    output: Path = options.output.resolve()
    done = read_results(output / "runs", runs)
    pending = [run for run in runs if run not in done]
    if options.job is None:
        hours = len(pending) * median_seconds(done.values(), SECONDS_PER_RUN) / 3600 / options.jobs
        print(f"{len(runs)} runs, {len(done)} of them done; the others take about {hours:.1f} h", flush=True)
    if options.dry_run or not pending:
        return 0
    output.mkdir(parents=True, exist_ok=True)
    settings = {"task": options.task, "model": options.model, "overrides": options.overrides}
    check_settings(output / SETTINGS_FILE, settings)
    task = TASKS[options.task]
    data = task.make_data(output)
    model = options.model or str(task.make_model(output, data))
    if options.jobs > 1:
        return run_jobs("examples.staleness_study", words, options.jobs)
    study = study_of(output, task.config, model, data, options.overrides)
    return run_session(study, pending, len(runs), options.job, SECONDS_PER_RUN)


def _tables(output: Path) -> int:
    from examples.staleness_study.measures import MEASURES
    from examples.staleness_study.tables import draw, tables
    from examples.studies.results import measured_again, read_results
    from nemo_rl_moe.atomic_writes import write_whole
    from nemo_rl_moe.errors import DataError

    done = read_results(output / "runs", plan(list(CORRECTIONS), list(REPLAYS), LAGS, range(1000)))
    results = {run: measured_again(output / "runs" / run.name, result, MEASURES) for run, result in done.items()}
    if not results:
        raise DataError(f"--output {output}: no run is done")
    text = tables(results)
    print(text)
    write_whole(output / "tables.md", text + "\n")
    draw(results, output / "study.png")
    print(f"image: {output / 'study.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

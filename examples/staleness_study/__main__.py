# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The staleness study: how much accuracy does training on responses of older weights cost, by the loss?

python -m examples.staleness_study run --corrections clipped,tis --replays none --lags 0,2,8 --seeds 12
python -m examples.staleness_study tables
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.staleness_study.grid import CORRECTIONS, LAGS, REPLAYS, SECONDS_PER_RUN, plan
from examples.studies.command import exit_code_of, run_missing, show_tables, some_of, study_parser

OUTPUT = Path("results/staleness_study")
_DESCRIPTION = """\
GRPO runs of a demo's tiny Mixture-of-Experts model on CPU cores: cells of a lag, a correction and a replay of routed
experts, each with several seeds. After an interrupt, the same command continues with the missing runs. Start it in the
repository's root. --dry-run prints how many hours a choice takes, and starts nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 2 for wrong input, 1 for a failed run, 130 or 143 if stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    return exit_code_of(lambda: _tables(options.output) if options.command == "tables" else _run(options, words))


def _parser() -> argparse.ArgumentParser:
    parser, run = study_parser("python -m examples.staleness_study", _DESCRIPTION, OUTPUT, seeds=12)
    for name, allowed in (("corrections", list(CORRECTIONS)), ("replays", list(REPLAYS))):
        run.add_argument(f"--{name}", type=some_of(allowed), default=allowed, help=f"of {','.join(allowed)}")
    run.add_argument("--lags", type=some_of(LAGS), default=list(LAGS), help=f"of {','.join(map(str, LAGS))}")
    run.add_argument(
        "--task",
        choices=("addition", "calculator"),
        default="addition",
        help="sums, or questions with a calculator as in make demo-tools (default: %(default)s)",
    )
    return parser


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from examples.staleness_study.configuration import study_of
    from examples.staleness_study.tasks import TASKS

    task = TASKS[options.task]

    def prepare(output: Path) -> tuple[Path, str]:
        data = task.make_data(output)
        return data, options.model or str(task.make_model(output, data))

    seeds = range(options.first_seed, options.first_seed + options.seeds)
    return run_missing(
        options,
        words,
        plan(options.corrections, options.replays, options.lags, seeds),
        module="examples.staleness_study",
        settings={"task": options.task},
        prepare=prepare,
        study_of=lambda output, data, model: study_of(output, task.config, model, data, options.overrides),
        seconds_per_run=SECONDS_PER_RUN,
    )


def _tables(output: Path) -> int:
    from examples.staleness_study.measures import MEASURES
    from examples.staleness_study.tables import draw, tables

    everything = plan(list(CORRECTIONS), list(REPLAYS), LAGS, range(1000))
    return show_tables(output, everything, MEASURES, tables=tables, draw=draw)


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The study of distillation: does the demo's model learn addition faster from a teacher than from rewards?

python -m examples.distillation_study run --tune
python -m examples.distillation_study run
python -m examples.distillation_study tables
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.distillation_study.grid import METHODS, SECONDS_PER_RUN, Run, comparison, tuning
from examples.studies.command import exit_code_of, run_missing, show_tables, some_of, study_parser

OUTPUT = Path("results/distillation_study")
MOST_SEEDS = 32
_DESCRIPTION = """\
Runs of the demo's tiny Mixture-of-Experts model on CPU cores: with rewards (GRPO), with only a teacher's probabilities
(distillation), and with those of a teacher whose tokens are shuffled. After an interrupt, the same command continues
with the missing runs. Start it in the repository's root. --dry-run prints how many hours a choice takes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 2 for wrong input, 1 for a failed run, 130 or 143 if stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, run = study_parser("python -m examples.distillation_study", _DESCRIPTION, OUTPUT, seeds=3)
    run.add_argument("--methods", type=some_of(METHODS), default=list(METHODS), help=f"of {','.join(METHODS)}")
    run.add_argument("--tune", action="store_true", help="try the learning rates, with separate seeds")
    options = parser.parse_args(words)
    return exit_code_of(lambda: _tables(options.output) if options.command == "tables" else _run(options, words))


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from examples.distillation_study.configuration import study_of
    from examples.distillation_study.teachers import make_teachers
    from examples.studies.preparation import make_data, make_model

    def prepare(output: Path) -> tuple[Path, str]:
        data = make_data(output)
        model = options.model or str(make_model("small", output, data))
        make_teachers(output, data, model)
        return data, model

    return run_missing(
        options,
        words,
        _chosen(options),
        module="examples.distillation_study",
        settings={},
        prepare=prepare,
        study_of=lambda output, data, model: study_of(
            output, data, model, make_teachers(output, data, model), options.overrides
        ),
        seconds_per_run=SECONDS_PER_RUN,
    )


def _chosen(options: argparse.Namespace) -> list[Run]:
    if options.tune:
        return tuning()
    return comparison(options.methods, range(options.first_seed, options.first_seed + options.seeds))


def _tables(output: Path) -> int:
    from examples.distillation_study.measures import MEASURES
    from examples.distillation_study.tables import draw, tables

    everything = [*tuning(), *comparison(list(METHODS), range(MOST_SEEDS))]
    return show_tables(output, everything, MEASURES, tables=tables, draw=draw)


if __name__ == "__main__":
    sys.exit(main())

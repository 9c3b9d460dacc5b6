# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The study of adapters: does LoRA differ from training all weights in accuracy, mismatch and routing?

python -m examples.lora_study run --part rates
python -m examples.lora_study run
python -m examples.lora_study tables
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.lora_study.grid import METHODS, RATE_SEEDS, SECONDS_PER_RUN, Run, choice_of_rates, comparison
from examples.studies.command import exit_code_of, run_missing, show_tables, some_of, study_parser

OUTPUT = Path("results/lora_study")
_DESCRIPTION = """\
GRPO runs of the demo's tiny Mixture-of-Experts model on CPU cores, with adapters and with all weights, each with
several seeds. After an interrupt, the same command continues with the missing runs. Start it in the repository's root.
--dry-run prints how many hours a choice takes, and starts nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 2 for wrong input, 1 for a failed run, 130 or 143 if stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, run = study_parser("python -m examples.lora_study", _DESCRIPTION, OUTPUT, seeds=12)
    run.add_argument("--methods", type=some_of(METHODS), default=list(METHODS), help=f"of {','.join(METHODS)}")
    run.add_argument(
        "--part",
        choices=("comparison", "rates"),
        default="comparison",
        help=f"methods at their learning rates, or several rates with {len(RATE_SEEDS)} other seeds"
        " (default: %(default)s)",
    )
    options = parser.parse_args(words)
    return exit_code_of(lambda: _tables(options.output) if options.command == "tables" else _run(options, words))


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from examples.lora_study.configuration import study_of
    from examples.studies.preparation import make_data, make_model

    def prepare(output: Path) -> tuple[Path, str]:
        data = make_data(output)
        return data, options.model or str(make_model("small", output, data))

    return run_missing(
        options,
        words,
        _chosen(options),
        module="examples.lora_study",
        settings={},
        prepare=prepare,
        study_of=lambda output, data, model: study_of(output, data, model, options.overrides),
        seconds_per_run=SECONDS_PER_RUN,
    )


def _chosen(options: argparse.Namespace) -> list[Run]:
    if options.part == "rates":
        return choice_of_rates(options.methods, RATE_SEEDS)
    return comparison(options.methods, range(options.first_seed, options.first_seed + options.seeds))


def _tables(output: Path) -> int:
    from examples.lora_study.measures import MEASURES
    from examples.lora_study.tables import draw, tables

    everything = [*choice_of_rates(list(METHODS), RATE_SEEDS), *comparison(list(METHODS), range(RATE_SEEDS[0]))]
    return show_tables(output, everything, MEASURES, tables=tables, draw=draw)


if __name__ == "__main__":
    sys.exit(main())

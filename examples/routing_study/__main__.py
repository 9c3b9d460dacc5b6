# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The routing study: does training with the experts of the rollout help, and do the alternatives?

python -m examples.routing_study run --grid small --cells none,r3 --updates 8 --dtypes bfloat16 --seeds 24
python -m examples.routing_study tables
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.routing_study.grid import (
    BASELINE,
    DTYPES,
    METHODS,
    MODELS,
    SECONDS_PER_RUN,
    UPDATES,
    hours_left,
    plan,
)
from examples.studies.command import (
    SETTINGS_FILE,
    check_settings,
    exit_code_of,
    run_jobs,
    run_session,
    some_of,
    study_parser,
)

OUTPUT = Path("results/routing_study")


def _hours_of_grid(model: str) -> str:
    """Return the hours of the full grid with enough seeds for a difference of 3%, one run at a time."""
    return f"{hours_left(plan(model, list(METHODS), DTYPES, UPDATES, range(24)), {}, 1):.0f}"


_DESCRIPTION = f"""\
GRPO runs of a tiny Mixture-of-Experts model with rollouts by vLLM, on CPU cores: cells of a method, a number of
updates per step and a number format of the rollouts, each with several seeds. After an interrupt, the same command
continues with the missing runs. Start it in the repository's root.

A run takes about {SECONDS_PER_RUN["small"]:.0f} s (small) or {SECONDS_PER_RUN["deep"]:.0f} s (deep) on a core, and the
full grid with 24 seeds {_hours_of_grid("small")} h (small) or {_hours_of_grid("deep")} h (deep), or half of that with
--jobs 2 on two cores. --dry-run prints how many hours a choice takes, and starts nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 2 for wrong input, 1 for a failed run, 130 or 143 if stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    return exit_code_of(lambda: _tables(options.output) if options.command == "tables" else _run(options, words))


def _parser() -> argparse.ArgumentParser:
    parser, run = study_parser("python -m examples.routing_study", _DESCRIPTION, OUTPUT, seeds=8)
    run.add_argument("--grid", choices=MODELS, default="small", help="the model (default: %(default)s)")
    run.add_argument("--cells", type=some_of(METHODS), default=list(METHODS), help=f"of {','.join(METHODS)}")
    run.add_argument("--updates", type=some_of(UPDATES), default=list(UPDATES), help="updates a step, of 1,2,4,8")
    run.add_argument("--dtypes", type=some_of(DTYPES), default=list(DTYPES), help=f"rollouts, of {','.join(DTYPES)}")
    return parser


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from examples.studies.results import read_results
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
    check_settings(output / SETTINGS_FILE, {"model": options.model, "overrides": options.overrides})
    data, model = _prepare(options, output)
    if options.jobs > 1:
        return run_jobs("examples.routing_study", words, options.jobs)

    from examples.routing_study.configuration import study_of
    from examples.routing_study.engines import SHELF

    try:
        study = study_of(output, model, data, options.overrides)
        return run_session(study, pending, len(runs), options.job, SECONDS_PER_RUN[options.grid])
    finally:
        SHELF.close()


def _prepare(options: argparse.Namespace, output: Path) -> tuple[Path, str]:
    """Return the folder of the data, and the initial model."""
    from examples.studies.preparation import make_data, make_model

    data = make_data(output)
    return data, options.model or str(make_model(options.grid, output, data))


def _tables(output: Path) -> int:
    from examples.routing_study.tables import draw, tables
    from examples.studies.results import read_results
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

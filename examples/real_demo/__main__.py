# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo with a released model: supervised fine-tuning, then reinforcement learning, of one seed or several.

python -m examples.real_demo --seeds 0,1,2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.real_demo.data import write_data
from examples.real_demo.results import Run, read_run, responses, table
from examples.studies.command import SETTINGS_FILE, check_settings, exit_code_of
from examples.studies.programs import run_stage

OUTPUT = Path("results/real_demo")
_NAME = "demo-real"
_FINAL = "final"
_MODEL = f"{_FINAL}/config.json"
"""A file that a complete run writes."""
_DESCRIPTION = """\
SmolLM2-135M-Instruct, made a Mixture-of-Experts model by `make real-model`, learns to say which of five kinds of thing
a word names: for each seed supervised fine-tuning on 20 words, then reinforcement learning on 100 words without their
answers. 60 words are held out. The seed decides which, and the order and the samples of training. After an
interrupt the same command continues. With more seeds it runs the missing ones. Start it in the repository's root.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 2 for wrong input, 1 for a failed run, 130 after an interrupt."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.real_demo",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=_seeds, default=[0], help="comma-separated (default: 0)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="override", help="section.key=value, of the GRPO runs")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _seeds(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seeds such as 0,1,2")
    return sorted(set(map(int, words)))


def _run(options: argparse.Namespace) -> int:
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    check_settings(output / SETTINGS_FILE, {"overrides": options.overrides})
    for seed in options.seeds:
        data = output / f"data-{seed}"
        write_data(data, seed)
        _train("sft", output / f"sft-{seed}", data, ("sft.jsonl", "sft_validation.jsonl"), [f"sft.seed={seed}"])
        start = [f"grpo.seed={seed}", f"policy.model_name={output / f'sft-{seed}' / _FINAL}", *options.overrides]
        _train("grpo", output / f"grpo-{seed}", data, ("grpo.jsonl", "validation.jsonl"), start)
    _report(output)
    return 0


def _train(command: str, folder: Path, data: Path, files: tuple[str, str], overrides: Sequence[str]) -> None:
    """Run a command of this package, unless its model exists. An interrupted run continues."""
    result = folder / _MODEL
    if result.is_file():
        return
    words = [
        *("-m", "nemo_rl_moe.cli", command, "--config", f"examples/configs/{command}_real_moe.yaml"),
        f"data.train.path={data / files[0]}",
        f"data.validation.path={data / files[1]}",
        f"checkpointing.checkpoint_dir={folder}",
        f"logger.log_dir={folder / 'logs'}",
        *overrides,
    ]
    run_stage(_NAME, words, result)


def _report(output: Path) -> None:
    """Print five responses, the experts of the words and the accuracies of all seeds, and write the report of a run."""
    from examples.real_demo.experts import draw_kinds, kinds_by_expert, sharpest_table
    from nemo_rl_moe.atomic_writes import write_whole
    from nemo_rl_moe.errors import DataError
    from nemo_rl_moe.runs.loggers.plots import as_png

    folders = {
        int(found.parents[1].name.rpartition("-")[2]): found.parents[1]
        for found in sorted(output.glob(f"grpo-*/{_MODEL}"))
    }
    if not folders:
        raise DataError(f"--output {output}: no run is complete")
    runs: dict[int, Run] = {seed: read_run(folder / "logs") for seed, folder in folders.items()}
    seed = min(runs)
    log = runs[seed].folder
    report = output / "report.html"
    run_stage(_NAME, ["-m", "nemo_rl_moe.cli", "report", str(log), "--output", str(report)], report)
    counts, lower_case = (kinds_by_expert(folders[seed] / _FINAL, spelled) for spelled in (str, str.lower))
    write_whole(output / "experts_by_kind.png", as_png(draw_kinds(counts, lower_case)))
    text = table(runs)
    write_whole(output / "table.md", f"{text}\n")
    print(f"\nResponses to held-out words before and after reinforcement learning, seed {seed}:")
    print(responses(runs[seed]))
    print(f"\nThe experts of the words, after it:\n{sharpest_table(counts, lower_case)}")
    print(f"\nShares of right responses to held-out words:\n{text}\n")
    print(f"report: {report}; experts of each kind of word: {output / 'experts_by_kind.png'}")


if __name__ == "__main__":
    sys.exit(main())

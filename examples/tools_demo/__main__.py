# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo with a tool: runs with several seeds and a control, their table and pictures.

python -m examples.tools_demo --seeds 0,1,2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.studies.command import SETTINGS_FILE, check_settings, exit_code_of
from examples.studies.programs import run_stage
from examples.tools_demo.results import METHODS, Run, table, validations

OUTPUT, DATA = Path("results/tools_demo"), Path("data/calculator")
_NAME = "tools-demo"
FINAL = "final"
_OVERRIDES = {
    "tool": (),
    "no_tool": ("env.driver.kind=single_turn",),
    # A deterministic reward, such as the cost of calls, could be learned.
    "coin": (
        "env.driver.call_cost=0",
        "env.reward.kind=callable",
        "env.reward.function=examples.random_reward:score",
        "env.score_truncated=true",
    ),
}
_SECTIONS = {"sft": ("grpo.", "env.", "loss_fn."), "grpo": ("sft.",)}
"""Sections that a command does not have."""
_DESCRIPTION = """\
A tiny Mixture-of-Experts model that cannot multiply learns to call a calculator and to copy its result: for each seed
supervised fine-tuning, then reinforcement learning with the tool and, as a control, without it. After an interrupt, the
same command continues. With more seeds it runs the missing ones. Start it in the repository's root.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 2 for wrong input, 1 for a failed run, 130 after an interrupt."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.tools_demo",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=_seeds, default=[0], help="comma-separated (default: 0)")
    names = ",".join(METHODS)
    parser.add_argument(
        "--methods", type=_methods, default=["tool", "no_tool"], help=f"of {names} (default: tool,no_tool)"
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="made if missing (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="override", help="section.key=value, of all runs")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(options))


def _seeds(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seeds such as 0,1,2")
    return sorted(set(map(int, words)))


def _methods(text: str) -> list[str]:
    words = text.split(",")
    if wrong := [word for word in words if word not in METHODS]:
        raise argparse.ArgumentTypeError(f"got {', '.join(wrong)}, expected some of {','.join(METHODS)}")
    return words


def _run(options: argparse.Namespace) -> int:
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    if not any(output.glob(f"sft-*/{FINAL}")):
        (output / SETTINGS_FILE).unlink(missing_ok=True)  # nothing was made with them
    check_settings(output / SETTINGS_FILE, {"overrides": options.overrides, "data": str(options.data)})
    if not (options.data / "manifest.json").is_file():  # the last file
        run_stage(_NAME, ["-m", "examples.tools_demo.data", "--output", str(options.data)])
    for seed in options.seeds:
        _fine_tune(output, options.data, seed, options.overrides)
        for method in options.methods:
            _reinforce(output, options.data, Run(method, seed), options.overrides)
    _report(output)
    return 0


def _fine_tune(output: Path, data: Path, seed: int, overrides: Sequence[str]) -> None:
    _train(
        "sft",
        output / f"sft-{seed}",
        data,
        ("train.jsonl", "validation.jsonl"),
        [f"sft.seed={seed}", f"policy.init_seed={seed}", *overrides],
    )


def _reinforce(output: Path, data: Path, run: Run, overrides: Sequence[str]) -> None:
    start = output / f"sft-{run.seed}" / FINAL
    _train(
        "grpo",
        output / run.name,
        data,
        ("grpo.jsonl", "validation_prompts.jsonl"),
        [f"grpo.seed={run.seed}", f"policy.model_name={start}", *_OVERRIDES[run.method], *overrides],
    )


def _train(command: str, folder: Path, data: Path, files: tuple[str, str], overrides: Sequence[str]) -> None:
    """Run a command of this package, unless its model exists. An interrupted run continues."""
    result = folder / FINAL / "config.json"
    if result.is_file():
        return
    others = _SECTIONS[command]
    words = [
        *("-m", "nemo_rl_moe.cli", command, "--config", f"examples/configs/{command}_tiny_moe_tools.yaml"),
        f"data.train.path={data / files[0]}",
        f"data.validation.path={data / files[1]}",
        f"checkpointing.checkpoint_dir={folder}",
        f"logger.log_dir={folder / 'logs'}",
        *(override for override in overrides if not override.startswith(others)),
    ]
    run_stage(_NAME, words, result)


def _report(output: Path) -> None:
    """Print the table of the complete runs, and make the pictures."""
    from examples.tools_demo.pictures import draw_learning, draw_routing
    from nemo_rl_moe.atomic_writes import write_whole
    from nemo_rl_moe.errors import DataError
    from nemo_rl_moe.runs.folder.folder import newest_run_folders
    from nemo_rl_moe.runs.folder.writer_load import FOLDER_NAME as WRITER_TABLE
    from nemo_rl_moe.runs.loggers.plots import as_png

    folders = {
        Run(method, int(found.name.rpartition("-")[2])): found
        for method in METHODS
        for found in sorted(output.glob(f"{method}-*"))
        if (found / FINAL / "config.json").is_file()
    }
    if not folders:
        raise DataError(f"--output {output}: no run is complete")
    # The reader reports a folder without a run.
    logs = {run: (newest_run_folders(found / "logs") or [found / "logs"])[0] for run, found in folders.items()}
    results = {run: validations(log) for run, log in logs.items()}
    text = table(results)
    print(f"\nShares of responses, before and after reinforcement learning; means are those after it\n\n{text}\n")
    write_whole(output / "table.md", f"{text}\n")
    write_whole(output / "learning.png", as_png(draw_learning(results)))
    pictures = [output / "learning.png"]
    with_writers = [log for log in logs.values() if (log / WRITER_TABLE).exists()]
    if with_writers:
        pictures.append(output / "experts_by_writer.png")
        write_whole(pictures[-1], as_png(draw_routing(with_writers[0])))
    print(f"pictures: {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    sys.exit(main())

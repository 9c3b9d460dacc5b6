# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The example in grpo.md: the demo with several seeds, and beside them a run whose reward is a coin toss.

    pip install matplotlib
    python docs/make_grpo_example.py --seeds logs/seed_0/exp_001 logs/seed_1/exp_001 --control logs/control/exp_001

Prints the table of all runs as Markdown and draws them over their steps. grpo.md has the commands that make the runs.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, MetricHistory, read_history

OUTPUT = Path(__file__).resolve().parent / "images" / "grpo.png"
PANELS = {
    "val/accuracy": "accuracy on held-out sums, sampled",
    "train/reward": "reward of the training responses",
    "train/mean_gen_tokens_per_sample": "tokens of a response",
    "train/moe/cv_mean": "spread of the expert load (cv_mean)",
}
CONTROL = "control: coin toss as reward"


def print_table(runs: Mapping[str, MetricHistory]) -> None:
    """Print the results of each run, one line a run."""
    print("| run | val/accuracy before | after | val/pass_at_4 before | after | tokens of a response | cv_mean |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, history in runs.items():
        first, last = ({key: values[end][1] for key, values in history.items()} for end in (0, -1))
        lengths = "val/mean_gen_tokens_per_sample"
        print(
            f"| {name} | {first['val/accuracy']:.3f} | {last['val/accuracy']:.3f} | {first['val/pass_at_4']:.3f}"
            f" | {last['val/pass_at_4']:.3f} | {first[lengths]:.1f} -> {last[lengths]:.1f}"
            f" | {first['train/moe/cv_mean']:.3f} -> {last['train/moe/cv_mean']:.3f} |"
        )


def draw(runs: Mapping[str, MetricHistory], output: Path, panels: Mapping[str, str] = PANELS) -> None:
    """Four panels over the steps, a curve for each run; panels: a metric and its title each."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for name, history in runs.items():
            steps, values = zip(*history[key], strict=True)
            style = "--" if name == CONTROL else "-"
            color = "gray" if name == CONTROL else None
            axis.plot(steps, values, style, color=color, marker="o" if key.startswith("val/") else None, label=name)
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    output.parent.mkdir(exist_ok=True)
    figure.savefig(output, dpi=110)


def named_runs(seeds: Sequence[Path], control: Path) -> dict[str, MetricHistory]:
    """Return what the runs logged, under the names that table and plot give them."""
    named = {f"seed {number}": folder for number, folder in enumerate(seeds)} | {CONTROL: control}
    return {name: read_history(folder / METRICS_FILE_NAME) for name, folder in named.items()}


def main() -> None:
    """Reads the runs' folders."""
    parser = argparse.ArgumentParser(description="Prints and draws the example in grpo.md.")
    parser.add_argument("--seeds", type=Path, nargs="+", required=True, help="the runs' folders, seed 0 first")
    parser.add_argument("--control", type=Path, required=True, help="the folder of the run with a random reward")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    chosen = parser.parse_args()
    runs = named_runs(chosen.seeds, chosen.control)
    print_table(runs)
    draw(runs, chosen.output)


if __name__ == "__main__":
    main()

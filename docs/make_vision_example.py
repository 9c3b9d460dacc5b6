# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Make the example in vision.md: the demo with images in several seeds, and a run whose reward is a coin toss.

    pip install matplotlib
    python docs/make_vision_example.py --data data/shapes --seeds logs/seed_1/exp_001 logs/seed_2/exp_001 \
        --control logs/control/exp_001

Prints the table of all runs as Markdown, plots some of the task, and plots the runs over their steps. vision.md has the
commands that make them.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, MetricHistory, read_history

IMAGES = Path(__file__).resolve().parent / "images"
PANELS = {
    "val/accuracy": "accuracy on held-out plots, sampled",
    "train/reward": "reward of the training responses",
    "train/moe/modality_separation_mean": "how far experts part image and text (modality_separation_mean)",
    "train/moe/cv_mean": "spread of the expert load (cv_mean)",
}
NUM_SHOWN = 8
CONTROL = "control: coin toss as reward"


def print_table(runs: Mapping[str, MetricHistory]) -> None:
    """Print the results of each run, one line a run."""
    print("| run | val/accuracy before | after | modality_separation_mean | cv_mean |")
    print("|---|---:|---:|---:|---:|")
    for name, history in runs.items():
        first, last = ({key: values[end][1] for key, values in history.items()} for end in (0, -1))
        parted, spread = "train/moe/modality_separation_mean", "train/moe/cv_mean"
        print(
            f"| {name} | {first['val/accuracy']:.3f} | {last['val/accuracy']:.3f}"
            f" | {first[parted]:.3f} -> {last[parted]:.3f} | {first[spread]:.3f} -> {last[spread]:.3f} |"
        )


def draw_task(data: Path, output: Path) -> None:
    """Draw some images of the task, each with its question and its answer."""
    lines = (data / "grpo_validation.jsonl").read_text().splitlines()[:NUM_SHOWN]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axis, line in zip(figure.subplots(2, NUM_SHOWN // 2).flat, lines, strict=True):
        record = json.loads(line)
        axis.imshow(Image.open(data / record["images"][0]))
        axis.set_title(f"{record['question']}  {record['answer']}", fontsize=9)
        axis.set_axis_off()
    figure.savefig(output, dpi=110)


def draw(runs: Mapping[str, MetricHistory], output: Path) -> None:
    """Draw four metrics over the steps, with a curve for each run."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, history in runs.items():
            steps, values = zip(*history[key], strict=True)
            style = "--" if name == CONTROL else "-"
            color = "gray" if name == CONTROL else None
            axis.plot(steps, values, style, color=color, marker="o" if key.startswith("val/") else None, label=name)
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(output, dpi=110)


def named_runs(seeds: Sequence[Path], control: Path) -> dict[str, MetricHistory]:
    """Read the metrics of each run."""
    named = {f"seed {number}": folder for number, folder in enumerate(seeds)} | {CONTROL: control}
    return {name: read_history(folder / METRICS_FILE_NAME) for name, folder in named.items()}


def main() -> None:
    """Print the table, and draw the task and the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of make_shapes_data.py")
    parser.add_argument("--seeds", type=Path, nargs="+", required=True, help="folders of runs")
    parser.add_argument("--control", type=Path, required=True, help="folder of the run with the coin toss")
    options = parser.parse_args()
    runs = named_runs(options.seeds, options.control)
    print_table(runs)
    draw_task(options.data, IMAGES / "shapes.png")
    draw(runs, IMAGES / "vision.png")


if __name__ == "__main__":
    main()
